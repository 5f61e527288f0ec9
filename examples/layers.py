"""Layers: a reader follows a writer and has a layer as soon as it is committed, long before the object is
whole. This is how a decode engine loads KV blocks that its prefill engine is still computing.

usage: python examples/layers.py [ADDRESS]     (default 127.0.0.1:50051)
"""

import sys
import threading
from queue import Queue

import numpy as np

from kvcore.client.sync_client import StoreClient
from kvcore.keys import BLOCK_HASH_BYTES, Namespace, block_keys
from kvcore.wire.messages import Status

NUM_LAYERS = 8
LAYER_BYTES = 64 << 10
NAMESPACE = Namespace(
    model="example",
    weights_id="1",
    kv_dtype="uint8",
    engine="example",
    engine_layout="plain",
    hash_scheme="counting",
    block_size_tokens=16,
    block_size_bytes=NUM_LAYERS * LAYER_BYTES,
    num_layers=NUM_LAYERS,
)
KEYS = block_keys(NAMESPACE.digest(), [number.to_bytes(BLOCK_HASH_BYTES, "big") for number in range(4)])


def layer_of(layer: int) -> list[np.ndarray]:
    """What the engine computes: one array for each block."""
    return [np.full(LAYER_BYTES, layer * len(KEYS) + block, np.uint8) for block in range(len(KEYS))]


def follow(address: str, arrived: "Queue[int]") -> None:
    """The reader asks before the writer has begun, and then stays one layer behind it: no polling."""
    with StoreClient.connect(address) as client:
        for layer in range(NUM_LAYERS):
            buffers = [np.empty(LAYER_BYTES, np.uint8) for _ in KEYS]
            statuses = client.read_layers(KEYS, layer, layer + 1, buffers, wait_ms=30_000).wait()
            is_right = all(map(np.array_equal, buffers, layer_of(layer)))
            print(f"read layer {layer}:", {status.name for status in statuses}, "right:", is_right)
            arrived.put(layer)


def main(address: str) -> None:
    arrived: Queue[int] = Queue()
    reader = threading.Thread(target=follow, args=(address, arrived))
    with StoreClient.connect(address) as client:
        client.batch_remove(KEYS, force=True)
        reader.start()
        granted = client.reserve(KEYS, NUM_LAYERS * LAYER_BYTES, NUM_LAYERS)
        if granted != [Status.OK] * len(KEYS):
            sys.exit(f"no room, or somebody else is writing: {granted}")
        for layer in range(NUM_LAYERS):
            if layer == NUM_LAYERS - 1:
                # Only to show it: the reader has all the others while this one does not exist yet.
                while arrived.get(timeout=30) < layer - 1:
                    pass
                print("layers 0 to", layer - 1, "were read before layer", layer, "was written")
            # The buffers belong to the transfer until it is done.
            client.write_layers(KEYS, layer, layer + 1, layer_of(layer)).wait()
        reader.join()
        hits = client.lookup(KEYS)
        print("whole blocks:", hits.num_hits)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
