"""Every example runs as its first lines say, and prints what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.store_process import StoreProcess

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OUTPUT = {
    "put_get": [
        "plane: shm",
        "put: OK - get: b'hello'",
        "put again: EXISTS - the first writer won",
        "array: 4194304 bytes, equal: True",
        "two buffers, equal: True",
        "absent: None -1",
        "removed: True",
    ],
    "batches": [
        "put: {'EXISTS': 16, 'OK': 240}",
        "there: 256 of 257",
        "absent: -1 - others: 4194304 bytes",
        "equal: True",
        "removed: {'OK': 256, 'MISSING': 1}",
    ],
    "layers": [
        "layers 0 to 6 were read before layer 7 was written",
        *(f"read layer {layer}: {{'OK'}} right: True" for layer in range(8)),
        "whole blocks: 4",
    ],
    "asyncio_client": [
        "put: {'OK'}",
        "got: 100 right",
        "there: 100 - absent: None",
        "objects in the store: 100",
        "left: 0",
    ],
    "pins_and_eviction": [
        "pin: HARD - 65536 bytes",
        "pin: SOFT - 65536 bytes",
        "pin: none - 65536 bytes",
        "remove a pinned one: LEASED",
        "evicted: 2 objects, 131072 bytes",
        "left: ['hard']",
        "remove it now: OK",
    ],
    "tiers": [
        "put: {'DRAM': 32}",
        "evicted: {'SSD': 32}",
        "prefetch: {'OK': 32}",
        "prefetched: {'DRAM': 32}",
        "right: True",
    ],
    "replicas": [
        "put: ['DRAM']",
        "copied: {'OK': 4}",
        "copied: ['DRAM', 'REMOTE']",
        "the only copy stays: INVALID",
        "evicted: ['SSD', 'REMOTE']",
        "prefetch: {'OK': 4}",
        "right: True",
        "removed: nowhere",
    ],
    "copies": [
        "put there: {'OK': 16}",
        "copied: {'OK': 16, 'MISSING': 1}",
        "equal: True",
        "asked again: {'OK': 16}",
        "copied in all: 16",
        "removed there, still here: 16",
    ],
    "mooncake_code": [
        "put: [0, 0, 0, 0]",
        "exist: [1, 1, 1, 1, 0]",
        "get: [4096, 4096, 4096, 4096, -704]",
        "equal: True",
        "size: 4096 - absent: -704",
        "remove: -706 - forced: [0, 0, 0, 0]",
    ],
}


def run(name: str, *addresses: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *addresses]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("name", OUTPUT)
def test_an_example_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    flags = []
    if name == "tiers":
        level = {"level": "ssd", "paths": [str(tmp_path / "ssd")], "capacity": "256mb"}
        flags = ["--storage-levels", json.dumps([level])]
    if name == "replicas":
        ssd = {"level": "ssd", "paths": [str(tmp_path / "ssd")], "capacity": "256mb"}
        remote = {"level": "remote", "url": f"file://{tmp_path}/remote"}
        flags = ["--storage-levels", json.dumps([ssd, remote])]
    folders = [tmp_path, tmp_path / "source"] if name == "copies" else [tmp_path]
    stores = [StoreProcess(folder, *flags, pool="32mb").start() for folder in folders]
    try:
        result = run(name, *(store.address for store in stores))
    finally:
        assert [store.stop() for store in stores] == [0] * len(stores)
    assert (result.returncode, result.stderr) == (0, "")
    # The reader and the writer of the layers print side by side.
    assert sorted(result.stdout.splitlines()) == sorted(OUTPUT[name])


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    readme = (EXAMPLES / "README.md").read_text()
    assert names == set(OUTPUT)
    assert all(f"`{name}.py`" in readme for name in names)
