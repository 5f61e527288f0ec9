"""One client process: takes commands as JSON lines on a socket, times calls, answers with the samples.

Runs in the peer's own interpreter where it needs one, so it imports nothing but numpy and the driver.
"""

import argparse
import hashlib
import importlib
import json
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from storebench.driver import Driver
from storebench.plan import Cell


class Worker:
    def __init__(self, driver: Driver, client: int, buffer_bytes: int) -> None:
        self._driver = driver
        self._client = client
        self._buffer_bytes = buffer_bytes
        self._source = driver.allocate(buffer_bytes)
        self._source[:] = np.random.default_rng(client).integers(0, 256, buffer_bytes, dtype=np.uint8)
        self._sink = driver.allocate(buffer_bytes)
        self._keys: dict[str, list[Any]] = {}

    def phase(self, cell: Cell, tag: str, max_calls: int, phase_s: float, start_ns: int) -> dict[str, Any]:
        """Run one cell; `tag` names the values, so that a get finds what the put before it wrote."""
        calls = self._prepare(cell, tag, max_calls)
        pause_s = (start_ns - time.monotonic_ns()) / 1e9
        if pause_s > 0:
            time.sleep(pause_s)
        latencies_ns: list[int] = []
        failures = 0
        cpu_begin_s = time.process_time()
        begin_ns = time.monotonic_ns()
        end_ns = begin_ns
        last_ns = begin_ns + int(phase_s * 1e9)
        for call in calls:
            called_ns = time.monotonic_ns()
            ok = call()
            end_ns = time.monotonic_ns()
            latencies_ns.append(end_ns - called_ns)
            failures += not ok
            if end_ns > last_ns:
                break
        cpu_s = time.process_time() - cpu_begin_s
        if cell.op == "put":
            del self._keys[tag][len(latencies_ns) * cell.num_keys :]
        wrong_bytes = self._wrong_bytes(cell, len(latencies_ns)) if cell.op == "get" and not failures else 0
        return {
            "latencies_ns": latencies_ns,
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "cpu_s": cpu_s,
            "failures": failures,
            "wrong_bytes": wrong_bytes,
        }

    def clear(self) -> None:
        self._keys.clear()
        self._driver.clear()

    def _prepare(self, cell: Cell, tag: str, max_calls: int) -> list[Callable[[], bool]]:
        driver, size_bytes = self._driver, cell.size_bytes
        if cell.op == "exists":
            if tag not in self._keys:
                self._fill(tag, cell.num_keys, size_bytes)
            asked = self._keys[tag][: cell.num_keys]
            return [lambda: driver.exists(asked)] * max_calls
        if cell.op == "put":
            self._keys[tag] = [self._key(tag, index) for index in range(max_calls * cell.num_keys)]
        else:
            self._sink[:] = 0
        keys = self._keys[tag]
        slots = self._slots(cell)
        one = driver.put if cell.op == "put" else driver.get
        many = driver.batch_put if cell.op == "put" else driver.batch_get

        def single(index: int) -> Callable[[], bool]:
            key, offset = keys[index], index % slots * size_bytes
            return lambda: one(key, offset, size_bytes)

        def batch(index: int) -> Callable[[], bool]:
            first = index * cell.num_keys
            batch_keys = keys[first : first + cell.num_keys]
            offsets = [(first + i) % slots * size_bytes for i in range(cell.num_keys)]
            return lambda: many(batch_keys, offsets, size_bytes)

        make = single if cell.num_keys == 1 else batch
        return [make(index) for index in range(min(max_calls, len(keys) // cell.num_keys))]

    def _fill(self, tag: str, num_keys: int, size_bytes: int) -> None:
        keys = self._keys[tag] = [self._key(tag, index) for index in range(num_keys)]
        slots = self._buffer_bytes // size_bytes
        for first in range(0, num_keys, 100):
            part = keys[first : first + 100]
            offsets = [(first + i) % slots * size_bytes for i in range(len(part))]
            if not self._driver.batch_put(part, offsets, size_bytes):
                raise RuntimeError(f"could not store the {num_keys} values that exists asks for")

    def _key(self, tag: str, index: int) -> Any:
        digest = hashlib.blake2b(f"{self._client}/{tag}/{index}".encode(), digest_size=32).digest()
        return self._driver.make_key(digest)

    def _slots(self, cell: Cell) -> int:
        return self._buffer_bytes // cell.size_bytes

    def _wrong_bytes(self, cell: Cell, calls: int) -> int:
        # Values wrap around in both buffers alike, so equal slots must hold equal bytes.
        used = min(calls * cell.num_keys, self._slots(cell)) * cell.size_bytes
        return int(np.count_nonzero(self._source[:used] != self._sink[:used]))


def load_driver(path: str, arguments: dict[str, Any]) -> Driver:
    module, _, name = path.partition(":")
    factory: Callable[..., Driver] = getattr(importlib.import_module(module), name)
    return factory(**arguments)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--arguments", type=json.loads, required=True)
    parser.add_argument("--client", type=int, required=True)
    parser.add_argument("--buffer-bytes", type=int, required=True)
    args = parser.parse_args()
    control = socket.socket(fileno=args.control_fd)
    stream = control.makefile("rw", encoding="utf-8")

    def answer(value: dict[str, Any]) -> None:
        stream.write(json.dumps(value) + "\n")
        stream.flush()

    try:
        driver = load_driver(args.driver, args.arguments)
        worker = Worker(driver, args.client, args.buffer_bytes)
        answer({"pid": os.getpid()})
        for line in stream:
            command = json.loads(line)
            if command["do"] == "phase":
                answer(worker.phase(Cell(*command["cell"]), **command["arguments"]))
            else:
                worker.clear()
                answer({})
        driver.close()
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
