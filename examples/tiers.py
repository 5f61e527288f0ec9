"""Tiers: what leaves DRAM goes to disk; bring it back before it is needed. Evicts everything from DRAM.

Needs a store with an SSD level, in its configuration file or as

    mooncake-store serve --storage-levels '[{"level": "ssd", "paths": ["/mnt/nvme0"], "capacity": "1tb"}]'

usage: python examples/tiers.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys
import time
from collections import Counter

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Tier

NUM_OBJECTS = 32
SIZE_BYTES = 256 << 10


def main(address: str) -> None:
    names = [f"document {number}" for number in range(NUM_OBJECTS)]

    with StoreClient.connect(address) as client:
        if "ssd_objects" not in client.stats():
            sys.exit(f"the store at {address} is not there, or has no SSD level")

        def show(when: str) -> None:
            tiers = Counter(Tier(info.tier).name if info else "nowhere" for info in client.describe(names))
            print(f"{when}: {dict(tiers)}")

        client.batch_put_from(names, [bytes([number + 1]) * SIZE_BYTES for number in range(NUM_OBJECTS)])
        show("put")
        # What is being saved to disk stays readable in DRAM until then, so that nothing is ever missing.
        while client.stats()["objects"]:
            client.evict()
            time.sleep(0.01)
        show("evicted")

        fetching = client.prefetch(names)  # returns at once
        print("prefetch:", dict(Counter(status.name for status in fetching.wait())))
        show("prefetched")
        print("right:", client.get(names[-1]) == bytes([NUM_OBJECTS]) * SIZE_BYTES)
        client.batch_remove(names)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
