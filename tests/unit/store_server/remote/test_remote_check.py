"""A check of the whole remote: what it finds, how fast it reads, what it says of a remote that is down."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from store_server.remote.backend import RemoteFailure
from store_server.remote.format import name_of
from tests.unit.store_server.remote.scripted import (
    DEADLINE_S,
    ScriptedBackend,
    TierDriver,
    key_of,
    value_of,
)

FAST = 1 << 40
SIZE = 3000


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * DEADLINE_S))


async def fill(driver: TierDriver, num_objects: int) -> None:
    for number in range(num_objects):
        await driver.write(number, num_layers=2)
    await driver.until(lambda: driver.num_listed)


def spoil(backend: ScriptedBackend, number: int) -> None:
    name = name_of(key_of(number), 2, SIZE)
    data = bytearray(backend.values[name])
    data[-7] ^= 1
    backend.values[name] = bytes(data)


def test_what_has_changed_is_dropped_and_the_rest_stays(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await fill(driver, 20)
            spoil(backend, 4)
            backend.values[name_of(key_of(9), 2, SIZE)] = b"short"
            del backend.values[name_of(key_of(11), 2, SIZE)]
            driver.outcomes.clear()
            assert driver.tier.trouble == ""
            check = driver.tier.check()
            await check.run(FAST)
            assert (check.num_objects, check.num_done, check.num_corrupt, check.num_unread) == (20, 20, 2, 0)
            driver.poll()
            assert sorted(driver.dropped()) == [
                ([key_of(4)], "corrupt"),
                ([key_of(9)], "corrupt"),
                ([key_of(11)], "gone"),
            ]
            assert driver.tier.stats()["corrupt_total"] == 2
            await driver.until(lambda: not driver.tier.stats()["deletions_pending"])
            assert len(backend.values) == len(driver.tier) == 17
            assert await driver.read(5) == value_of(5)

    run(work)


def test_it_is_not_read_faster_than_asked(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await fill(driver, 12)
            loop = asyncio.get_running_loop()
            begin_s = loop.time()
            check = driver.tier.check()
            await check.run(100 * SIZE)
            # The last of the twelve has its turn when eleven others have had theirs.
            assert loop.time() - begin_s >= 11 / 100 - 0.001
            assert check.num_done == 12

    run(work)


def test_a_remote_that_is_down_is_said_to_be(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await fill(driver, 30)
            backend.failure = RemoteFailure("connection refused")
            asked = backend.num_requests
            check = driver.tier.check()
            await check.run(FAST)
            assert (check.num_done, check.num_corrupt, check.num_unread) == (30, 0, 30)
            assert check.last_failure == "connection refused"
            assert backend.num_requests - asked < 15, "it is not asked for each of them"
            assert "connection refused" in driver.tier.trouble
            assert len(driver.tier) == 30, "nothing is dropped for it"

    run(work)


def test_a_remote_that_was_never_listed_is_trouble(backend: ScriptedBackend) -> None:
    async def work() -> None:
        backend.failure = RemoteFailure("no such bucket")
        async with TierDriver(backend) as driver:
            await driver.until(lambda: driver.tier.stats()["failures_total"])
            assert "no such bucket" in driver.tier.trouble

    run(work)


def test_it_can_be_cut_short(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await fill(driver, 5)
            backend.gate = asyncio.Event()
            check = driver.tier.check()
            running = asyncio.ensure_future(check.run(FAST))
            await driver.until(lambda: backend.num_at_once)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert check.num_done == 0
            await driver.until(lambda: not backend.num_at_once)

    run(work)
