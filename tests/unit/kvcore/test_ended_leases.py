"""How much of the pool a client may hold on to when it is done with it."""

from typing import Any, cast

import pytest

from kvcore.transport.channel import Channel
from kvcore.transport.ended_leases import (
    LINGERING_LEASE_MS,
    MAX_LINGERING_BYTES,
    MAX_LINGERING_LEASES,
    EndedLeases,
)
from kvcore.wire import messages as m


class Messages:
    """A channel that writes down which leases are released by a message of their own."""

    def __init__(self) -> None:
        self.released: list[int] = []

    def forget(self, kind: type[m.Message], fields: tuple[Any, ...]) -> None:
        assert kind is m.Release
        self.released += fields


@pytest.fixture
def messages() -> Messages:
    return Messages()


@pytest.fixture
def leases(messages: Messages) -> EndedLeases:
    return EndedLeases(cast(Channel, messages), lease_ms=10_000)


@pytest.mark.parametrize(
    ("sizes_bytes", "lingering", "released"),
    [
        ([MAX_LINGERING_BYTES], [0], []),
        ([MAX_LINGERING_BYTES + 1], [], [0]),
        ([MAX_LINGERING_BYTES, 1], [0], [1]),
        ([MAX_LINGERING_BYTES - 1, 2, 1], [0, 2], [1]),
        ([1] * (MAX_LINGERING_LEASES + 1), list(range(MAX_LINGERING_LEASES)), [MAX_LINGERING_LEASES]),
        ([0, -1], [], [0, 1]),
    ],
)
def test_little_waits_for_the_next_acquire(
    messages: Messages,
    leases: EndedLeases,
    sizes_bytes: list[int],
    lingering: list[int],
    released: list[int],
) -> None:
    for lease, size_bytes in enumerate(sizes_bytes):
        leases.end(lease, size_bytes)
    assert messages.released == released
    assert leases.take() == lingering and leases.take() == []


def test_what_was_taken_leaves_room(messages: Messages, leases: EndedLeases) -> None:
    for lease in range(3):
        leases.end(lease, MAX_LINGERING_BYTES)
        assert leases.take() == [lease]
    assert messages.released == []


def test_settling_ends_them_all(messages: Messages, leases: EndedLeases) -> None:
    leases.end(7, 1)
    leases.end(8, 1)
    leases.settle()
    assert messages.released == [7, 8] and leases.take() == []


def test_a_lease_that_may_linger_is_a_short_one(leases: EndedLeases) -> None:
    assert leases.duration_ms(MAX_LINGERING_BYTES) == LINGERING_LEASE_MS
    assert leases.duration_ms(MAX_LINGERING_BYTES + 1) == 10_000
