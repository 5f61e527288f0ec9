"""A hot prefix reaches the store of the engine that Algorithm 1 chooses: real stores, a stand-in engine."""

import asyncio
import contextlib
import hashlib
import signal
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.keys import block_keys
from kvcore.wire.events import BlockStored
from kvcore.wire.messages import Status
from kvsim.recorded import read_lines, replay
from router.app import Router
from router.core.block_hash import block_hashes
from router.core.estimator import PrefillModel
from router.core.record import Arrival
from router.core.settings import Settings
from router.core.view import Role
from router.recorder import Recorder
from tests.integration.router_harness import Setup, Turn, async_test, fails, running, until, well
from tests.integration.store_harness import StoreProcess, eventually, store_starter
from tests.integration.test_store_copies import PATIENT, is_emptied
from tests.integration.test_store_events import EVENTS

NUM_BLOCKS = 8
SIZE = 4096
PROMPT = list(range(NUM_BLOCKS * 16 + 5))
OWN = block_hashes(PROMPT, 16)
BODY = {"model": "m", "prompt": PROMPT}
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_BLOCKS)]
# The parts that two ranks of an engine have of each block: equal names in events, different keys.
KEYS = [key for rank in (b"0", b"1") for key in block_keys(rank * 16, DIGESTS)]
VALUES = [bytes([number]) * SIZE for number in range(len(KEYS))]
NAMES = [int.from_bytes(digest[-8:], "big") for digest in DIGESTS]
# Computing takes so long here that every copy is waited for to its end, however busy the machine is.
SLOW = Settings(prefill_model=PrefillModel(per_token_ms=100.0))


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[StoreProcess, StoreProcess]]:
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="mks-")) for _ in range(2)]
        far, near = (
            stack.enter_context(store_starter(Path(folder)))(*PATIENT, *EVENTS) for folder in folders
        )
        yield far, near


@pytest.fixture
def stores(started: tuple[StoreProcess, StoreProcess]) -> tuple[StoreProcess, StoreProcess]:
    """Both empty."""
    for store in started:
        with StoreClient.connect(store.ready["address"]) as client:
            eventually(partial(is_emptied, client))
    return started


def config(far: StoreProcess, near: StoreProcess) -> dict[str, Any]:
    """The engines run on the host of `near`."""
    names = "events_endpoint", "events_replay_endpoint"
    near_events = ",".join(near.ready[name] for name in names)
    far_events = ",".join(far.ready[name] for name in names).replace("127.0.0.1", "localhost")
    return {
        "policy": "global_cache_aware",
        "scheduling": SLOW,
        "store_kv_events": [
            f"{far_events}={far.ready['address']}",
            f"{near_events}={near.ready['address']}",
        ],
    }


def fill(store: StoreProcess) -> None:
    with StoreClient.connect(store.ready["address"]) as client:
        assert client.batch_put_from(KEYS, VALUES) == [Status.OK] * len(KEYS)


async def knows_the_prefix(setup: Setup, far: StoreProcess) -> None:
    index = setup.router.index
    assert index is not None
    # The stores' events know names only; whose tokens they are an engine has said, which is gone now.
    book = setup.router.cluster.book
    worker = book.add_instance("an engine that is gone", Role.MIXED)
    book.set_available("an engine that is gone", False)
    index.apply(worker, [BlockStored(NAMES, None, PROMPT[: 16 * NUM_BLOCKS], 16)])
    await asyncio.to_thread(fill, far)
    await until(lambda: index.match(OWN, 0.0).best_blocks == NUM_BLOCKS)


def test_a_hot_prefix_is_in_the_engines_store_before_the_engine_is_asked(
    stores: tuple[StoreProcess, StoreProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, near = stores
    file = tmp_path / "live.record"
    with StoreClient.connect(near.ready["address"]) as here:
        seen: list[list[Status]] = []

        async def looks(turn: Turn) -> None:
            seen.append(await asyncio.to_thread(here.batch_status, KEYS))
            await well(turn)

        @async_test
        async def check() -> None:
            async with running(mixed=1, **config(far, near)) as setup:
                setup.engines["m0"].default = looks
                await knows_the_prefix(setup, far)
                answers = await asyncio.gather(*(setup.ask("/v1/completions", BODY) for _ in range(3)))
                assert [answer.status for answer in answers] == [200] * 3
                assert seen == [[Status.OK] * len(KEYS)] * 3
                # One copy for all three, and none when the prefix is there.
                assert (await setup.ask("/v1/completions", BODY)).status == 200
                assert +setup.router.copier.counts == {"copied": len(KEYS)}
                assert not setup.router.prefetcher.counts
                assert setup.router.copier.num_running == 0
                text = (await setup.ask("/metrics")).body.decode()
                assert f'copied_blocks_total{{outcome="copied"}} {len(KEYS)}.0' in text
                found = await setup.ask("/decisions")
                assert "replicate_hot_prefix" in found.body.decode()

        with Recorder(file) as recorder:
            recording = partial(Router, record=recorder.write)
            monkeypatch.setattr("tests.integration.router_harness.Router", recording)
            check()
        buffers = [bytearray(SIZE) for _ in KEYS]
        assert here.batch_get_into(KEYS, buffers) == [SIZE] * len(KEYS)
        assert buffers == VALUES
    # Waiting and copying are in the record: the core decides the same from it.
    decided = [(then, Arrival.of(then.request, now, then.at)) for then, now in replay(read_lines(file))]
    assert len(decided) == 7, "three that waited are decided twice, the fourth once"
    assert [now for _, now in decided] == [then for then, _ in decided]


def test_a_client_that_leaves_while_its_prefix_is_copied_leaves_nothing_behind(
    stores: tuple[StoreProcess, StoreProcess],
) -> None:
    far, near = stores

    @async_test
    async def check() -> None:
        async with running(mixed=1, **config(far, near)) as setup:
            await knows_the_prefix(setup, far)
            near.process.send_signal(signal.SIGSTOP)
            client = await setup.client()
            await client.send("/v1/completions", BODY)
            await until(lambda: setup.router.copier.num_running == 1)
            client.close()
            await until(lambda: setup.router.metrics.active_requests == 0)
            near.process.send_signal(signal.SIGCONT)
            await until(lambda: setup.router.copier.num_running == 0)
            assert not setup.engines["m0"].seen

    check()
    with StoreClient.connect(near.ready["address"]) as here:
        eventually(lambda: here.batch_status(KEYS) == [Status.OK] * len(KEYS))


def test_a_source_that_is_away_costs_one_wait_and_no_request(
    stores: tuple[StoreProcess, StoreProcess],
) -> None:
    far, near = stores

    @async_test
    async def check() -> None:
        async with running(mixed=1, **config(far, near)) as setup:
            await knows_the_prefix(setup, far)
            far.process.send_signal(signal.SIGKILL)
            far.process.wait()
            counts = setup.router.copier.counts
            # The engine answers nothing, else it would have the prefix from then on.
            setup.engines["m0"].script.append(fails(500))
            assert (await setup.ask("/v1/completions", BODY)).status == 500
            assert counts["failed"] == NUM_BLOCKS
            # The next one is not made to wait for what has just failed.
            assert (await setup.ask("/v1/completions", BODY)).status == 200
            assert (counts["left"], counts["copied"]) == (NUM_BLOCKS, 0)

    check()
