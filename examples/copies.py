"""Two stores: what one holds is copied to the other, where engines of that host find it.

Needs a second store that has what is to be copied, for example

    mooncake-store serve --port 50061 --admin-port 50062

usage: python examples/copies.py [ADDRESS [SOURCE]]     (default 127.0.0.1:50051 127.0.0.1:50061)
"""

import sys
from collections import Counter
from collections.abc import Sequence

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status

NAMES = [f"block {number} of a hot prefix" for number in range(16)]
SIZE_BYTES = 256 << 10


def counted(statuses: Sequence[Status]) -> dict[str, int]:
    return dict(Counter(status.name for status in statuses))


def main(address: str, source: str) -> None:
    with StoreClient.connect(address) as here, StoreClient.connect(source) as there:
        if not (here.connected and there.connected):
            sys.exit(f"stores are needed at {address} and at {source}")
        print(
            "put there:", counted(there.batch_put_from(NAMES, [bytes([n]) * SIZE_BYTES for n in range(16)]))
        )
        # `here` fetches them itself; the bytes do not pass through this process.
        wanted = [*NAMES, "nobody has this"]
        print("copied:", counted(here.copy_from(wanted, source, wait_ms=10_000)))
        print("equal:", all(here.get(name) == there.get(name) for name in NAMES))
        print("asked again:", counted(here.copy_from(NAMES, source, wait_ms=10_000)))
        print("copied in all:", int(here.stats()["copied_objects_total"]))
        there.batch_remove(NAMES)
        print("removed there, still here:", sum(here.batch_exists(NAMES)))
        here.batch_remove(NAMES)


if __name__ == "__main__":
    addresses = [*sys.argv[1:], *("127.0.0.1:50051", "127.0.0.1:50061")[len(sys.argv) - 1 :]]
    main(*addresses)
