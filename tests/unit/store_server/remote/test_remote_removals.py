"""What clients have had removed while the remote could not be told does not come back with it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.messages import Status
from store_server.remote import doomed
from store_server.remote.backend import RemoteFailure
from store_server.remote.doomed import DoomedKeys, decode, encode
from tests.unit.store_server.remote.scripted import (
    DEADLINE_S,
    ScriptedBackend,
    TierDriver,
    key_of,
    value_of,
)

DOWN = RemoteFailure("down")


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * DEADLINE_S))


def removed_by_a_client(driver: TierDriver, *numbers: int) -> None:
    keys = [key_of(number) for number in numbers]
    driver.tier.note_removal(keys)
    driver.tier.remove(keys)


def files_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


async def is_clean(driver: TierDriver) -> None:
    await driver.listed_again()
    await driver.until(lambda: not driver.tier.stats()["deletions_pending"])
    await driver.listed_again()


def test_it_is_gone_when_the_remote_is_back(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            for number in range(4):
                await driver.write(number)
            await driver.listed_again()
            backend.failure = DOWN
            await driver.until(lambda: not driver.tier.is_available)
            removed_by_a_client(driver, 1)
            backend.failure = None
            await driver.until(lambda: driver.tier.is_available)
            driver.outcomes.clear()
            await is_clean(driver)
            assert key_of(1) not in driver.tier and len(backend.values) == 3
            assert not [o for o in driver.outcomes if isinstance(o, list)], "it is not found again in between"

    run(work)


def test_what_this_store_never_saw_goes_as_well(backend: ScriptedBackend) -> None:
    async def work() -> None:
        async with TierDriver(backend) as writer:
            for number in range(4):
                await writer.write(number)
        backend.failure = DOWN
        async with TierDriver(backend) as driver:
            removed_by_a_client(driver, 2)
            assert driver.tier.trouble
            backend.failure = None
            await driver.until(lambda: driver.num_listed)
            await is_clean(driver)
            assert (
                sorted(driver.tier) == [key_of(number) for number in (0, 1, 3)] and len(backend.values) == 3
            )
            assert await driver.write(2) is Status.OK
            await is_clean(driver)
            assert await driver.read(2) == value_of(2), "put again, it stays"

    run(work)


def test_what_another_store_wrote_since_the_last_listing_goes_as_well(
    backend: ScriptedBackend, tmp_path: Path
) -> None:
    async def work() -> None:
        async with TierDriver(backend) as driver:
            async with TierDriver(backend, refresh_ms=1e9, notes_in=[tmp_path]) as other:
                await driver.until(lambda: driver.num_listed)
                await other.until(lambda: other.num_listed)
                await driver.write(1)
                assert key_of(1) not in other.tier
                removed_by_a_client(other, 1)
                assert not other.tier.trouble
            async with TierDriver(backend, notes_in=[tmp_path]) as again:
                await again.until(lambda: again.num_listed)
                assert len(again.tier) == 0
                await driver.until(lambda: len(driver.tier) == 0)
                assert not backend.values

    run(work)


def test_a_restart_does_not_forget_it(backend: ScriptedBackend, tmp_path: Path) -> None:
    async def work() -> None:
        async with TierDriver(backend, notes_in=[tmp_path]) as driver:
            for number in range(6):
                await driver.write(number)
            await driver.listed_again()
            backend.failure = DOWN
            removed_by_a_client(driver, 3)  # not yet known to be down: its deletion fails
            await driver.until(lambda: not driver.tier.is_available)
            removed_by_a_client(driver, 4, 99)
        assert len(files_in(tmp_path)) == 1
        backend.failure = None
        async with TierDriver(backend, notes_in=[tmp_path / "not there", tmp_path]) as driver:
            await driver.until(lambda: driver.num_listed)
            found = [key for outcome in driver.outcomes if isinstance(outcome, list) for key in outcome]
            assert sorted(found) == [key_of(number) for number in (0, 1, 2, 5)]
            await is_clean(driver)
            assert len(backend.values) == 4
        assert files_in(tmp_path) == [], "and when it is done nothing is left"

    run(work)


def test_no_more_is_remembered_than_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doomed, "MAX_KEYS", 10)
    keys = DoomedKeys()
    keys.open([tmp_path], "s3://bucket")
    keys.add([key_of(number) for number in range(25)], 0)
    assert len(keys) == 10 and key_of(24) in keys and key_of(14) not in keys
    keys.close([])
    again = DoomedKeys()
    again.open([tmp_path], "s3://bucket")
    assert len(again) == 10 and key_of(24) in again
    again.close([])
    others = DoomedKeys()
    others.open([tmp_path], "s3://another-bucket")
    assert len(others) == 0
    others.close([])


@given(st.lists(st.binary(min_size=1, max_size=255)), st.integers(0, 300))
def test_notes_are_read_back_as_far_as_they_were_written(keys: list[bytes], cut: int) -> None:
    data = encode(keys)
    assert decode(data) == keys
    whole = decode(data[:cut])
    assert whole == keys[: len(whole)] and len(encode(whole)) <= cut
