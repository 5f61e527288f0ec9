"""A real engine's KV events and a real store's name the same blocks: one index can follow both."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.core.block_hash import block_hashes
from router.core.prefix_index import PrefixIndex
from router.core.view import NO_WORKER, InstanceState
from tests.engine.following import follow
from tests.engine.rig import BLOCK_TOKENS, DOCUMENT, EngineHost, StoreProcess, request, transfer_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = DOCUMENT[:650]
NUM_BLOCKS = len(PROMPT) // BLOCK_TOKENS


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Not tmp_path: the path of a Unix socket may have no more than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mks-") as name:
        yield Path(name)


def test_one_index_knows_what_the_engine_and_the_store_hold(
    host: EngineHost, tmp_path: Path, sockets: Path, engine_kwargs: dict[str, Any]
) -> None:
    store_replay, engine_replay = f"ipc://{sockets}/store-replay", f"ipc://{sockets}/engine-replay"
    flags = ("--events.endpoint", f"ipc://{sockets}/store", "--events.replay-endpoint", store_replay)
    store = StoreProcess(tmp_path, *flags)
    try:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{sockets}/engine",
            "replay_endpoint": engine_replay,
        }
        host.call(
            "start", engine={**engine_kwargs, "kv_events_config": events}, transfer=transfer_config(store)
        )
        host.call("generate", requests=[request(PROMPT)])
        assert host.call("settle")["drained"]

        index = PrefixIndex(BLOCK_TOKENS)
        engine_worker = follow(index, "engine", engine_replay)
        store_worker = follow(index, "store", store_replay)
        assert index.stats.unknown_hash == 0, "the store names no block that the engine does not"
        match = index.match(block_hashes(PROMPT, BLOCK_TOKENS), 0.0)
        for instance in (
            InstanceState("engine", engine_worker, NO_WORKER),
            InstanceState("empty, beside the store", NO_WORKER, store_worker),
        ):
            assert match.local_blocks_of((instance,)) == [NUM_BLOCKS]
    finally:
        host.call("stop")
        store.close()
