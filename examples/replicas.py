"""Copies: on which levels an object lies, adding one, dropping one, and eviction that loses nothing.

Needs a store with an SSD and a remote level, in its configuration file or as

    mooncake-store serve --storage-levels '[
        {"level": "ssd", "paths": ["/mnt/nvme0/kv"], "capacity": "1tb"},
        {"level": "remote", "url": "file:///mnt/nfs/kv"}]'

usage: python examples/replicas.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys
import time
from collections import Counter

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import EvictStrategy, Tier

NAMES = [f"system prompt {number}" for number in range(4)]
SIZE_BYTES = 256 << 10


def main(address: str) -> None:
    with StoreClient.connect(address) as client:
        if "remote_objects" not in client.stats():
            sys.exit(f"the store at {address} is not there, or has no remote level")

        def show(when: str) -> None:
            (info,) = client.describe(NAMES[:1])
            print(f"{when}:", [Tier(tier).name for tier in info.copies] if info else "nowhere")

        client.batch_put_from(NAMES, [bytes([number + 1]) * SIZE_BYTES for number in range(4)])
        show("put")
        print("the only copy stays:", client.change_replica(NAMES[:1], drop=Tier.DRAM)[0].name)
        # On the remote other stores find it, and it outlives this machine.
        added = client.change_replica(NAMES, add=Tier.REMOTE, wait_ms=10_000)
        print("copied:", dict(Counter(status.name for status in added)))
        show("copied")
        # Only what has a copy where eviction would save it goes: nothing is written, nothing is lost.
        client.change_replica(NAMES, add=Tier.SSD, wait_ms=10_000)
        while client.stats()["objects"]:
            client.evict(strategy=EvictStrategy.COPIES)
            time.sleep(0.01)
        show("evicted")
        fetching = client.prefetch(NAMES, Tier.DRAM)  # Tier.SSD would bring it from the remote to the SSD
        print("prefetch:", dict(Counter(status.name for status in fetching.wait())))
        print("right:", client.get(NAMES[-1]) == bytes([4]) * SIZE_BYTES)
        client.batch_remove(NAMES)
        show("removed")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
