"""Pins and eviction. Evicts everything that is not pinned: do not try it on a store that is in use.

usage: python examples/pins_and_eviction.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import PinKind

SIZE_BYTES = 64 << 10


def main(address: str) -> None:
    with StoreClient.connect(address) as client:
        names = ["hard", "soft", "plain"]
        client.batch_put_from(names, [bytes([number]) * SIZE_BYTES for number in (1, 2, 3)])
        client.pin("hard", PinKind.HARD)  # never evicted
        client.pin("soft", PinKind.SOFT, ttl_ms=60_000)  # evicted last, while its time is not over
        for info in client.describe(names):
            if info is not None:
                print("pin:", PinKind(info.pin).name if info.pin else "none", f"- {info.size_bytes} bytes")

        print("remove a pinned one:", client.remove("hard").name)
        num_objects, size_bytes = client.evict()
        print(f"evicted: {num_objects} objects, {size_bytes} bytes")
        print("left:", [name for name, there in zip(names, client.batch_exists(names), strict=True) if there])

        client.unpin("hard")
        print("remove it now:", client.remove("hard").name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
