"""Code written for Mooncake's Python bindings. Only the import differs (docs/mooncake_api.md):

-from mooncake.store import MooncakeDistributedStore, ReplicateConfig
+from kvcore.client.mooncake import MooncakeDistributedStore, ReplicateConfig

usage: python examples/mooncake_code.py [ADDRESS]     (default: MOONCAKE_MASTER, else 127.0.0.1:50051)
"""

import os
import sys

import numpy as np

from kvcore.client.mooncake import MooncakeDistributedStore, ReplicateConfig


def main(address: str) -> None:
    store = MooncakeDistributedStore()
    retcode = store.setup("localhost", "P2PHANDSHAKE", 512 << 20, 128 << 20, "tcp", "", address)
    if retcode:
        sys.exit(f"setup failed: {retcode}")

    pages = np.arange(4 * 4096, dtype=np.uint8).reshape(4, 4096)
    target = np.zeros_like(pages)
    for array in (pages, target):
        store.register_buffer(array.ctypes.data, array.nbytes)

    keys = [f"page_{number}" for number in range(4)]
    sources = [row.ctypes.data for row in pages]
    targets = [row.ctypes.data for row in target]
    config = ReplicateConfig()
    config.with_hard_pin = True
    print("put:", store.batch_put_from(keys, sources, [4096] * 4, config))
    print("exist:", store.batch_is_exist([*keys, "absent"]))
    print("get:", store.batch_get_into([*keys, "absent"], [*targets, targets[0]], [4096] * 5))
    print("equal:", np.array_equal(pages, target))
    print("size:", store.get_size("page_0"), "- absent:", store.get_size("absent"))
    print("remove:", store.remove("page_0"), "- forced:", [store.remove(key, True) for key in keys])

    for array in (pages, target):
        store.unregister_buffer(array.ctypes.data)
    store.close()


if __name__ == "__main__":
    default = os.environ.get("MOONCAKE_MASTER", "127.0.0.1:50051")
    main(sys.argv[1] if len(sys.argv) > 1 else default)
