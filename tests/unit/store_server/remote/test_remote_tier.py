"""The remote tier over a backend that a test can slow down, break and look into."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.remote.backend import RemoteFailure
from store_server.remote.breaker import FAILURES_IN_A_ROW
from store_server.remote.format import name_of
from tests.unit.store_server.remote.scripted import (
    DEADLINE_S,
    ScriptedBackend,
    TierDriver,
    key_of,
    value_of,
)

OK = Status.OK


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * DEADLINE_S))


def test_what_was_written_is_read_back(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            assert await driver.write(1, value_of(1), num_layers=3) is OK
            place = driver.tier.find(key_of(1))
            assert place is not None and place.num_layers == 3
            assert await driver.read(1) == value_of(1)
            assert await driver.read(2) is Status.MISSING
            stats = driver.tier.stats()
            assert stats["written_bytes_total"] == stats["read_bytes_total"] == stats["live_bytes"] == 3000

    run(work)


def test_another_store_finds_it_and_learns_when_it_goes(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as writer, TierDriver(backend) as reader:
            for number in range(10):
                await writer.write(number)
            await reader.until(lambda: len(reader.tier) == 10)
            found = [key for outcome in reader.outcomes if isinstance(outcome, list) for key in outcome]
            assert sorted(found) == [key_of(number) for number in range(10)]
            assert await reader.read(4) == value_of(4)
            writer.tier.remove([key_of(4)])
            await reader.until(lambda: key_of(4) not in reader.tier)
            assert ([key_of(4)], "gone") in reader.dropped()
            assert len(backend.values) == 9

    run(work)


def test_what_has_gone_behind_our_back_is_a_miss(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await driver.write(1)
            backend.values.clear()
            assert await driver.read(1) is Status.MISSING
            assert driver.dropped() == [([key_of(1)], "gone")] and key_of(1) not in driver.tier

    run(work)


def test_changed_bytes_are_never_served(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            await driver.write(1)
            name = name_of(key_of(1), 1, 3000)
            backend.values[name] = backend.values[name][:-1] + b"!"
            assert await driver.read(1) is Status.CORRUPT
            assert driver.tier.stats()["corrupt_total"] == 1
            await driver.until(lambda: name not in backend.values)
            assert await driver.read(1) is Status.MISSING

    run(work)


def test_no_more_is_under_way_than_allowed(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, max_in_flight_bytes=20 * 3000, num_requests=4) as driver:
            await driver.until(lambda: driver.num_listed)
            backend.gate = asyncio.Event()
            taken = [driver.begin_write(number) for number in range(30)]
            assert taken == [Acceptance.QUEUED] * 20 + [Acceptance.BUSY] * 10
            assert not driver.tier.takes_writes
            await driver.until(lambda: backend.num_at_once >= 4)
            backend.gate.set()
            await driver.until(lambda: driver.written(19) is OK)
            await driver.until(lambda: len(driver.tier) == 20)
            assert backend.most_at_once <= 5  # four writes and a listing
            assert driver.tier.takes_writes and driver.begin_write(25) is Acceptance.QUEUED

    run(work)


def test_one_that_is_larger_than_that_goes_alone(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, max_in_flight_bytes=1000) as driver:
            backend.gate = asyncio.Event()
            assert driver.begin_write(1) is Acceptance.QUEUED
            assert driver.begin_write(2) is Acceptance.BUSY
            backend.gate.set()
            await driver.until(lambda: driver.written(1) is OK)
            assert await driver.write(2) is OK

    run(work)


def test_a_remote_that_is_down_is_left_alone_and_found_again(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            await driver.write(1)
            backend.failure = RemoteFailure("down")
            for number in range(2, 2 + FAILURES_IN_A_ROW):
                if driver.tier.is_available:
                    assert await driver.write(number) is Status.UNAVAILABLE
            await driver.until(lambda: not driver.tier.is_available)
            assert driver.tier.find(key_of(1)) is None
            assert driver.begin_write(9) is Acceptance.REFUSED
            asked = backend.num_requests
            for _ in range(100):
                assert await driver.read(1) is Status.MISSING
            assert backend.num_requests <= asked + 1
            backend.failure = None
            await driver.until(lambda: driver.tier.is_available)
            assert await driver.read(1) == value_of(1)

    run(work)


def test_an_error_that_a_library_makes_up_is_a_miss(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            await driver.write(1)
            backend.failure = ZeroDivisionError("of a library")
            assert await driver.read(1) is Status.UNAVAILABLE
            backend.failure = None
            assert await driver.read(1) == value_of(1)

    run(work)


def test_a_remote_that_never_answers_ends_with_the_deadline(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, timeout_ms=30) as driver:
            await driver.write(1)
            backend.gate = asyncio.Event()
            assert await driver.read(1) is Status.UNAVAILABLE
            assert await driver.write(2) is Status.UNAVAILABLE
            await driver.until(lambda: not driver.tier.is_available)
            backend.gate.set()
            backend.gate = None
            await driver.until(lambda: driver.tier.is_available)
            assert await driver.read(1) == value_of(1)

    run(work)


def test_what_is_removed_while_it_is_written_does_not_appear(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            await driver.until(lambda: driver.num_listed)
            backend.gate = asyncio.Event()
            driver.begin_write(1)
            driver.tier.remove([key_of(1)])
            backend.gate.set()
            await driver.until(lambda: driver.written(1) is Status.ABANDONED)
            await driver.until(lambda: not driver.tier.stats()["deletions_pending"])
            assert not backend.values and key_of(1) not in driver.tier

    run(work)


def test_a_removal_waits_for_the_remote_to_be_back(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            await driver.write(1)
            backend.failure = RemoteFailure("down")
            driver.tier.remove([key_of(1)])
            await driver.until(lambda: driver.tier.stats()["failures_total"] >= 1)
            assert driver.tier.find(key_of(1)) is None and backend.values
            backend.failure = None
            await driver.until(lambda: not backend.values)

    run(work)


def test_written_again_before_its_removal_went_out_it_stays(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, refresh_ms=1e9) as driver:
            await driver.write(1)
            driver.tier.remove([key_of(1)])
            assert await driver.write(1) is OK
            await driver.until(lambda: not driver.tier.stats()["deletions_pending"])
            assert await driver.read(1) == value_of(1)

    run(work)


def test_over_its_capacity_the_longest_unused_go(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, capacity_bytes=5 * 3000, refresh_ms=1e9) as driver:
            for number in range(5):
                await driver.write(number)
            assert await driver.read(0) == value_of(0)
            await driver.write(5)
            assert driver.dropped() == [([key_of(1)], "over capacity")]
            assert await driver.read(0) == value_of(0)
            await driver.until(lambda: len(backend.values) == 5)
            assert driver.begin_write(6, bytes(16_000)) is Acceptance.REFUSED

    run(work)


def test_more_than_the_index_holds_is_not_known(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as writer:
            for number in range(8):
                await writer.write(number)
        async with TierDriver(backend, max_keys=5) as driver:
            await driver.listed_again()
            assert len(driver.tier) == 5 and driver.tier.stats()["unindexed_objects"] == 3
            await driver.write(9)
            assert len(driver.tier) == 5 and await driver.read(9) == value_of(9)

    run(work)


def test_closing_writes_what_was_accepted(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend, num_requests=2) as driver:
            for number in range(50):
                assert driver.begin_write(number) is Acceptance.QUEUED
        assert len(backend.values) == 50

    run(work)


def test_closing_does_not_wait_for_a_remote_that_hangs(backend: ScriptedBackend) -> None:
    async def work() -> None:
        driver = TierDriver(backend, num_requests=2, timeout_ms=50)
        driver.tier.open(1 << 20, 100)
        backend.gate = asyncio.Event()
        for number in range(50):
            assert driver.begin_write(number) is Acceptance.QUEUED
        await driver.tier.close(grace_s=0.05)
        driver.poll()
        assert not backend.values
        assert {driver.written(number) for number in range(50)} == {Status.UNAVAILABLE}

    run(work)
