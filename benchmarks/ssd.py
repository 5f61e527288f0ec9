"""The SSD tier beside the disk itself, in one run.

    python benchmarks/ssd.py DIRECTORY [--size 1mb] [--dram 256mb] [--keys 1000000] [--json FILE]

Prints the O_DIRECT rates of the disk, those of the tier, a whole store that is given twice its DRAM at full
speed, and what rebuilding the index takes with and without snapshots. Everything is written below DIRECTORY
and removed.
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvcore.client.sync_client import StoreClient
from kvcore.keys import object_key
from kvcore.units import format_size, parse_size_bytes
from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.ssd import DiskConfig, ReadRequest, SsdConfig, SsdTier, WriteRequest
from store_server.ssd.aligned import AlignedBuffer

CHUNK_BYTES = 4 << 20
DEADLINE_S = 120.0
CAPACITY_BYTES = 64 << 30


def random_memory(size_bytes: int) -> memoryview:
    memory = AlignedBuffer(size_bytes).take(size_bytes)
    np.frombuffer(memory, dtype=np.uint8)[:] = np.random.default_rng(1).integers(
        0, 256, len(memory), np.uint8
    )
    return memory


def disk_rates(directory: Path, total_bytes: int) -> dict[str, float]:
    """One file, 4 MiB at a time, as fast as one thread can: the yardstick."""
    memory = random_memory(16 * CHUNK_BYTES)
    chunks = [memory[at : at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES)]
    path = directory / "raw"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, total_bytes)
        begin_s = time.perf_counter()
        for number in range(total_bytes // CHUNK_BYTES):
            os.pwrite(fd, chunks[number % len(chunks)], number * CHUNK_BYTES)
        os.fdatasync(fd)
        write_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        for number in range(total_bytes // CHUNK_BYTES):
            os.preadv(fd, [chunks[number % len(chunks)]], number * CHUNK_BYTES)
        read_s = time.perf_counter() - begin_s
    finally:
        os.close(fd)
        path.unlink()
    return {"disk_write": total_bytes / write_s, "disk_read": total_bytes / read_s}


class TierRun:
    """Keeps a tier busy and waits for it."""

    def __init__(self, directory: Path) -> None:
        self._ready = threading.Event()
        disk = DiskConfig(path=directory, capacity_bytes=CAPACITY_BYTES)
        self.tier = SsdTier(SsdConfig(disks=(disk,)), self._ready.set)
        self.report = self.tier.open()

    def finished(self) -> int:
        if not self._ready.wait(DEADLINE_S):
            sys.exit("the disk does not answer")
        self._ready.clear()
        outcomes = self.tier.poll()
        bad = [o for o in outcomes if getattr(o, "status", Status.OK) != Status.OK]
        if bad:
            sys.exit(f"failed: {bad[0]}")
        return len(outcomes)

    def write(self, num_objects: int, size_bytes: int, memory: memoryview) -> float:
        begin_s, done, queued = time.perf_counter(), 0, 0
        slots = len(memory) // size_bytes
        while done < num_objects:
            while queued < num_objects:
                at = queued % slots * size_bytes
                request = WriteRequest(key(queued), [memory[at : at + size_bytes]], size_bytes)
                if self.tier.write(request) is not Acceptance.QUEUED:
                    break
                queued += 1
            done += self.finished()
        return num_objects * size_bytes / (time.perf_counter() - begin_s)

    def read(self, num_objects: int, size_bytes: int, memory: memoryview, in_flight: int = 8) -> float:
        begin_s, done, queued = time.perf_counter(), 0, 0
        slots = len(memory) // size_bytes
        order = np.random.default_rng(2).permutation(num_objects)
        while done < num_objects:
            while queued < num_objects and queued - done < min(in_flight, slots):
                at = queued % slots * size_bytes
                self.tier.read(ReadRequest(key(int(order[queued])), [memory[at : at + size_bytes]]))
                queued += 1
            done += self.finished()
        return num_objects * size_bytes / (time.perf_counter() - begin_s)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def tier_rates(directory: Path, size_bytes: int, total_bytes: int) -> dict[str, float]:
    memory = random_memory(max(128 << 20, size_bytes))
    run, num_objects = TierRun(directory / "tier"), max(total_bytes // size_bytes, 1)
    try:
        rates = {
            "tier_write": run.write(num_objects, size_bytes, memory),
            "tier_read": run.read(num_objects, size_bytes, memory),
        }
    finally:
        run.tier.close()
    shutil.rmtree(directory / "tier")
    return rates


def rebuild_times(directory: Path, num_keys: int) -> dict[str, float]:
    """Of an index of small objects: what it takes depends on the number of keys, hardly on their size."""
    memory, path = random_memory(16 << 20), directory / "index"
    run = TierRun(path)
    run.write(num_keys, 4096, memory)
    run.tier.close()
    run = TierRun(path)
    memory_bytes = run.tier.metadata_bytes
    with_snapshot_s = run.report.elapsed_s
    run.tier.close()
    for snapshot in path.glob("*.index"):
        snapshot.unlink()
    run = TierRun(path)
    run.tier.close()
    scale = 1e6 / num_keys
    shutil.rmtree(path)
    return {
        "rebuild_s_per_million": with_snapshot_s * scale,
        "rescan_s_per_million": run.report.elapsed_s * scale,
        "index_bytes_per_key": memory_bytes / num_keys,
    }


def store_rates(directory: Path, size_bytes: int, dram_bytes: int) -> dict[str, float]:
    """A store of its own process; its client writes over shared memory without a pause."""
    num_objects = 2 * dram_bytes // size_bytes
    level = {"level": "ssd", "paths": [str(directory / "store")], "capacity": CAPACITY_BYTES}
    ready_file = directory / "ready.json"
    command = [sys.executable, "-m", "store_server.cli", "serve", "--port", "0", "--admin-port", "-1"]
    command += ["--pool-size-bytes", str(dram_bytes), "--storage-levels", json.dumps([level])]
    command += ["--ready-file", str(ready_file), "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                sys.exit("the store did not start")
            time.sleep(0.01)
        ready = json.loads(ready_file.read_text())
        with StoreClient.connect(ready["unix_address"], timeout_ms=60_000) as client:
            return _fill_store(client, num_objects, size_bytes)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _fill_store(client: StoreClient, num_objects: int, size_bytes: int) -> dict[str, float]:
    values = random_memory(max(64 << 20, 8 * size_bytes))
    slots = len(values) // size_bytes
    names = [object_key(f"spill {number}") for number in range(num_objects)]
    rejected = 0
    begin_s = time.perf_counter()
    for first in range(0, num_objects, 8):
        batch = names[first : first + 8]
        at = [(first + index) % slots * size_bytes for index in range(len(batch))]
        statuses = client.batch_put_from(batch, [values[begin : begin + size_bytes] for begin in at])
        rejected += sum(status != Status.OK for status in statuses)
    elapsed_s = time.perf_counter() - begin_s
    lost = client.batch_exists(names).count(False)
    on_disk = client.stats()["ssd_written_bytes_total"]
    return {
        "store_put": num_objects * size_bytes / elapsed_s,
        "store_spill": on_disk / elapsed_s,
        "rejected": rejected,
        "lost": lost,
    }


def show(figures: dict[str, float]) -> None:
    def rate(name: str) -> str:
        return f"{figures[name] / 1e9:6.2f} GB/s"

    print(f"disk, O_DIRECT           write {rate('disk_write')}   read {rate('disk_read')}")
    print(f"tier                     write {rate('tier_write')}   read {rate('tier_read')}")
    print(f"                         of the disk  {figures['tier_write'] / figures['disk_write']:5.2f}")
    print(f"store, twice its DRAM      put {rate('store_put')}  spill {rate('store_spill')}")
    print(f"                         of the disk  {figures['store_spill'] / figures['disk_write']:5.2f}")
    print(f"                         rejected {figures['rejected']:.0f}, lost {figures['lost']:.0f}")
    print(
        f"index, a million keys    {figures['rebuild_s_per_million']:.1f} s with snapshots, "
        f"{figures['rescan_s_per_million']:.1f} s by scanning, "
        f"{figures['index_bytes_per_key']:.0f} bytes a key"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="on the disk to measure")
    parser.add_argument("--size", default="1mb", help="of an object")
    parser.add_argument("--total", default="2gb", help="bytes written by the disk and tier runs")
    parser.add_argument("--dram", default="256mb", help="pool of the store")
    parser.add_argument("--keys", type=int, default=200_000, help="in the index that is rebuilt")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options: Any = parser.parse_args(arguments)
    size_bytes, total_bytes = parse_size_bytes(options.size), parse_size_bytes(options.total)
    if size_bytes % mmap.PAGESIZE:
        parser.error(f"--size must be a multiple of {mmap.PAGESIZE}")
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="ssd-bench-") as name:
        directory = Path(name)
        figures = {
            **disk_rates(directory, total_bytes),
            **tier_rates(directory, size_bytes, total_bytes),
            **store_rates(directory, size_bytes, parse_size_bytes(options.dram)),
            **rebuild_times(directory, options.keys),
        }
    print(f"objects of {format_size(size_bytes)}")
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
