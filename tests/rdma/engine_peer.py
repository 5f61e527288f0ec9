"""Engines on the other host, for test_transfer_engine.py: as many as asked for, each with memory of one size.

Says its addresses as a line of JSON, then answers each line it gets with the digests of all memories.
"""

import hashlib
import json
import sys

import numpy as np

from kvcore.transport.engine import EngineConfig, TransferEngine


def main(host: str, devices: str, num_engines: str, size_bytes: str) -> None:
    engines, memories = [], []
    for number in range(int(num_engines)):
        config = EngineConfig(host=host, device_name=devices, protocol="rdma", max_endpoints=16)
        engines.append(TransferEngine(config))
        memories.append(np.full(int(size_bytes), number, np.uint8))
        engines[-1].register_local_memory(memories[-1])
    print(json.dumps([engine.address for engine in engines]), flush=True)
    for _ in sys.stdin:
        print(json.dumps([hashlib.sha256(memory).hexdigest() for memory in memories]), flush=True)
    for engine in engines:
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
