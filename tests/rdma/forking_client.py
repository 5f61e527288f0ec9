"""forking_client.py ADDRESS DEVICES: a client whose process forks; the child ends as Python processes do, and
frees what it knows. Prints OK when the parent's transfers go on over RDMA and the child's work without."""

import os
import sys
import time

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status

VALUE = bytes(range(256)) * 1024


def check(condition: bool, what: object) -> None:
    if not condition:
        sys.exit(f"failed: {what}")


def main() -> None:
    address, devices = sys.argv[1:]
    patience = dict.fromkeys(("timeout_ms", "connect_timeout_ms", "silence_ms"), 30_000)
    client = StoreClient.connect(address, planes=("rdma", "tcp"), device_name=devices, **patience)
    memory = bytearray(VALUE)
    region = client.register(memory)
    check(client.put("before", memory) is Status.OK, client.counters())
    child = os.fork()
    if child == 0:
        check(not client.connected, "the child has no connection of its own yet")
        while not client.connected:
            time.sleep(0.01)
        check(client.get("before") == VALUE, client.counters())
        check(client.counters()["plane"] == "tcp", client.counters())
        check("forked" in str(client.counters()["plane_reason"]), client.counters())
        region.close()
        client.close()
        sys.exit(0)
    check(os.waitpid(child, 0)[1] == 0, "the child")
    before = int(client.counters()["rdma_moved_bytes_total"])
    check(client.put("after", memory) is Status.OK, client.counters())
    check(client.get("after") == VALUE, client.counters())
    check(int(client.counters()["rdma_moved_bytes_total"]) == before + 2 * len(VALUE), client.counters())
    region.close()
    client.close()
    print("OK")


if __name__ == "__main__":
    main()
