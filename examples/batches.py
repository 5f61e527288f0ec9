"""Batches: many keys are one message, and each has its own result.

usage: python examples/batches.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys
from collections import Counter

import numpy as np

from kvcore.client.sync_client import StoreClient

NUM_OBJECTS = 256
SIZE_BYTES = 16 << 10


def main(address: str) -> None:
    values = np.random.default_rng(0).integers(0, 256, (NUM_OBJECTS, SIZE_BYTES), dtype=np.uint8)
    keys = [f"page {number}" for number in range(NUM_OBJECTS)]
    with StoreClient.connect(address) as client:
        client.batch_put_from(keys[:16], list(values[:16]))
        statuses = client.batch_put_from(keys, list(values))
        print("put:", dict(Counter(status.name for status in statuses)))

        found = client.batch_exists([*keys, "absent"])
        print("there:", found.count(True), "of", len(found))

        received = np.empty_like(values)
        sizes_bytes = client.batch_get_into(["absent", *keys], [np.empty(1, np.uint8), *received])
        print("absent:", sizes_bytes[0], "- others:", sum(sizes_bytes[1:]), "bytes")
        print("equal:", np.array_equal(values, received))

        removed = client.batch_remove([*keys, "absent"])
        print("removed:", dict(Counter(status.name for status in removed)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
