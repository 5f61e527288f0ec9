"""The store looks for the next request for a moment before it sleeps, and does not call that work."""

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from kvcore.errors import ConfigError
from store_server.config import StoreConfig
from store_server.wakefulness import Wakefulness


class Turns:
    """A loop whose turns are taken one by one, and its clocks: in each turn a second passes, and the thread
    runs for a quarter of it."""

    def __init__(self, spin_s: float) -> None:
        self.time_s = 0.0
        self._due: list[Callable[[], None]] = []
        self.wakefulness = Wakefulness(
            cast(asyncio.AbstractEventLoop, self), spin_s, lambda: self.time_s, lambda: self.time_s / 4
        )

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def take(self) -> bool:
        """False: the loop would sleep."""
        due, self._due = self._due, []
        for callback in due:
            callback()
        self.time_s += 1.0
        return bool(self._due)


def test_the_next_request_is_looked_for_as_long_as_it_says() -> None:
    turns = Turns(spin_s=3.0)
    turns.wakefulness.served()
    assert [turns.take() for _ in range(6)] == [True, True, True, False, False, False]


def test_every_request_begins_it_anew() -> None:
    turns = Turns(spin_s=3.0)
    for _ in range(5):
        turns.wakefulness.served()
        turns.wakefulness.served()
        assert turns.take() and turns.take()
    assert [turns.take() for _ in range(3)] == [True, False, False]


def test_who_wants_the_core_for_others_has_the_loop_sleep_at_once() -> None:
    turns = Turns(spin_s=0.0)
    turns.wakefulness.served()
    assert not turns.take()


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="spin_us must not be negative"):
        StoreConfig(spin_us=-1).check()


def test_looking_in_vain_is_counted_and_answering_is_not() -> None:
    turns = Turns(spin_s=3.0)
    for _ in range(10):
        turns.wakefulness.served()
        turns.take()
    assert turns.wakefulness.spun_s == 0.0
    while turns.take():
        pass
    assert turns.wakefulness.spun_s == 3 / 4


def test_load_is_what_was_put_to_use() -> None:
    turns = Turns(spin_s=0.0)
    begin_s = time.process_time()
    while time.process_time() - begin_s < 0.05:
        pass
    turns.time_s = 0.1
    busy = turns.wakefulness.load()
    assert 0.5 <= busy <= 1.0
    turns.time_s += time.process_time() - begin_s + 1e4
    assert turns.wakefulness.load() < 0.01
    # Looking took all of the next second.
    turns.wakefulness.spun_s += 1.0
    turns.time_s += 1.0
    assert turns.wakefulness.load() < 0.01
