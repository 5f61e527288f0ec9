"""Put and get: bytes, NumPy arrays, several buffers for one object.

usage: python examples/put_get.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys

import numpy as np

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status


def main(address: str) -> None:
    with StoreClient.connect(address) as client:
        if client.plane is None:
            sys.exit(f"no store answers on {address}; start one with: mooncake-store serve")
        print("plane:", client.plane.name)

        status = client.put("greeting", b"hello")
        print("put:", status.name, "- get:", client.get("greeting"))
        print("put again:", client.put("greeting", b"other").name, "- the first writer won")

        # Anything with the buffer protocol goes without a copy of ours; it must be contiguous.
        array = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
        client.put_from("array", array)
        received = np.empty_like(array)
        size_bytes = client.get_into("array", received)
        print(f"array: {size_bytes} bytes, equal: {np.array_equal(array, received)}")

        # Several buffers make one object: the keys and the values of a block, say.
        client.put_from("block", [array[0], array[1]])
        halves = [np.empty(1024, np.float32), np.empty(1024, np.float32)]
        client.get_into("block", halves)
        print("two buffers, equal:", all(np.array_equal(array[row], halves[row]) for row in (0, 1)))

        # Nothing raises for a miss, a full store, or no store at all.
        print("absent:", client.get("absent"), client.get_into("absent", received))
        if client.remove("greeting") is Status.OK:
            print("removed:", not client.exists("greeting"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
