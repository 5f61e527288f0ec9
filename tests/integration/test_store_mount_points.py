"""A store on memory and a disk that are named by paths: what DAX devices and NVMe over Fabrics look like to
it."""

import json
from pathlib import Path

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import StoreProcess

MIB = 1 << 20


def test_pool_in_a_file_spill_to_a_device_and_a_restart(tmp_path: Path) -> None:
    memory, disk = tmp_path / "dax0.0", tmp_path / "nvme1n1"
    with disk.open("wb") as file:
        file.truncate(512 * MIB)
    levels = [
        {"level": "cpu", "capacity": 16 * MIB, "paths": [str(memory)]},
        {"level": "ssd", "capacity": 512 * MIB, "paths": [str(disk)]},
    ]
    store = StoreProcess(
        tmp_path / "store", "--storage-levels", json.dumps(levels), pool=str(16 * MIB)
    ).start()
    values = {number.to_bytes(32, "big"): number.to_bytes(2, "big") * (MIB // 4) for number in range(60)}
    try:
        with StoreClient.connect(store.unix_address, planes=("shm", "tcp")) as client:
            assert client.counters()["plane"] == "shm"
            for key, value in values.items():
                assert client.put(key, value) is Status.OK
            assert all(client.get(key) == value for key, value in values.items())
        assert store.stop() == 0
        store.start()
        with StoreClient.connect(store.unix_address, planes=("shm", "tcp")) as client:
            assert all(client.get(key) == value for key, value in values.items())
    finally:
        store.stop()
    assert memory.stat().st_size >= 15 * MIB and disk.stat().st_size == 512 * MIB
