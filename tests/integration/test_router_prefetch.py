"""What Algorithm 1 transfers is brought from a real store's disk to its memory while the request waits."""

import hashlib
from pathlib import Path

from kvcore.client.sync_client import StoreClient
from kvcore.keys import block_keys
from kvcore.wire.events import BlockStored
from kvcore.wire.messages import Tier
from router.core.block_hash import block_hashes
from tests.integration.router_harness import async_test, running, until
from tests.integration.store_harness import StartStore, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_events import EVENTS
from tests.integration.test_store_ssd import levels

NUM_BLOCKS = 8
PROMPT = list(range(NUM_BLOCKS * 16))
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_BLOCKS)]
KEYS = block_keys(bytes(16), DIGESTS)
NAMES = [int.from_bytes(digest[-8:], "big") for digest in DIGESTS]


def test_blocks_on_disk_are_in_memory_when_the_engine_asks(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir), *EVENTS)
    with StoreClient.connect(store.ready["address"]) as client:
        for key in KEYS:
            assert client.put(key, b"k" * 4096).name == "OK"

        def tiers() -> list[int]:
            return [info.tier if info is not None else 0 for info in client.describe(KEYS)]

        def all_on_disk() -> bool:
            client.evict()
            return tiers() == [Tier.SSD] * NUM_BLOCKS

        eventually(all_on_disk)

        @async_test
        async def check() -> None:
            # Not the engines' host: what the store holds is to be fetched.
            events, replay = (
                store.ready[name].replace("127.0.0.1", "localhost")
                for name in ("events_endpoint", "events_replay_endpoint")
            )
            address = store.ready["address"]
            async with running(
                mixed=1,
                policy="global_cache_aware",
                store_kv_events=[f"{events},{replay}={address}"],
            ) as setup:
                index = setup.router.index
                assert index is not None
                # The store's events know names only; whose tokens they are an engine has said.
                index.apply(index.add_worker("told by an engine"), [BlockStored(NAMES, None, PROMPT, 16)])
                own = block_hashes(PROMPT, 16)
                await until(lambda: index.match(own, 0.0).best_blocks == NUM_BLOCKS)
                answer = await setup.ask("/v1/completions", {"model": "m", "prompt": PROMPT})
                assert answer.status == 200
                counts = setup.router.prefetcher.counts
                await until(lambda: counts["fetched"] == NUM_BLOCKS)
                assert +counts == {"fetched": NUM_BLOCKS}
                text = (await setup.ask("/metrics")).body.decode()
                assert f'prefetched_blocks_total{{outcome="fetched"}} {NUM_BLOCKS}.0' in text

        check()
        assert eventually(lambda: tiers() == [Tier.DRAM] * NUM_BLOCKS)
