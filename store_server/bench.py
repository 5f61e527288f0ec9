"""`mooncake-store bench`: how fast a store is from here, with the client that engines use.

A quick look, one client, no peers beside it; benchmarks/ compares properly.
"""

import json
import os
import time
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvcore.client.sync_client import StoreClient
from kvcore.errors import StoreUnavailable
from kvcore.metrics import POOL_SIZE_BYTES
from kvcore.units import format_size
from kvcore.wire.messages import Status

_EXISTS_KEYS = 128
_MIN_CALLS = 5


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on one size. Times are of one call, bandwidth is bytes over the sum of all calls."""

    operation: str
    size_bytes: int
    calls: int
    p50_us: float
    p99_us: float
    gb_per_s: float


def run(client: StoreClient, sizes_bytes: list[int], seconds: float, *, as_json: bool) -> None:
    """`seconds` for each operation and size. Its own objects are removed again."""
    pool_bytes = client.stats().get(POOL_SIZE_BYTES, 0)
    plane = client.plane
    if not pool_bytes or plane is None:
        raise StoreUnavailable("the store went away while it was asked")
    figures: list[Figure] = []
    with tqdm(total=len(sizes_bytes), unit="size", leave=False, disable=None) as bar:
        for size_bytes in sizes_bytes:
            figures += _one_size(client, size_bytes, seconds, int(pool_bytes))
            bar.update()
    figures.append(_exists(client, seconds))
    if as_json:
        print(json.dumps({"plane": plane.name, "figures": [msgspec.structs.asdict(one) for one in figures]}))
        return
    title = f"one client over {plane.name}"
    table = Table("operation", "size", "p50 us", "p99 us", "GB/s", title=title, show_edge=False)
    for one in figures:
        bandwidth = f"{one.gb_per_s:.2f}" if one.gb_per_s else ""
        size = format_size(one.size_bytes) if one.size_bytes else ""
        table.add_row(one.operation, size, f"{one.p50_us:.0f}", f"{one.p99_us:.0f}", bandwidth)
    Console().print(table)


def _one_size(client: StoreClient, size_bytes: int, seconds: float, pool_bytes: int) -> Iterator[Figure]:
    # Few enough that nothing else in the store has to make room for a benchmark.
    num_keys = max(min(64, pool_bytes // 16 // size_bytes), 1)
    keys = [os.urandom(32) for _ in range(num_keys)]
    value, target = bytearray(os.urandom(size_bytes)), bytearray(size_bytes)

    regions = [client.register(value), client.register(target)]

    def put(number: int) -> bool:
        return client.put_from(keys[number % num_keys], value) is Status.OK

    def get(number: int) -> bool:
        return client.get_into(keys[number % num_keys], target) == size_bytes

    def remove(number: int) -> None:
        client.remove(keys[number % num_keys], force=True)

    try:
        yield _measure("put", size_bytes, put, seconds, before=remove)
        for number in range(num_keys):
            put(number)
        yield _measure("get", size_bytes, get, seconds)
    finally:
        for number in range(num_keys):
            remove(number)
        for region in regions:
            region.close()


def _exists(client: StoreClient, seconds: float) -> Figure:
    keys = [os.urandom(32) for _ in range(_EXISTS_KEYS)]
    name = f"exists of {_EXISTS_KEYS} keys"
    return _measure(name, 0, lambda number: len(client.batch_exists(keys)) == _EXISTS_KEYS, seconds)


def _measure(
    operation: str,
    size_bytes: int,
    call: Callable[[int], bool],
    seconds: float,
    before: Callable[[int], None] | None = None,
) -> Figure:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _MIN_CALLS or time.perf_counter() < end:
        if before is not None:
            before(len(times))
        begin = time.perf_counter()
        is_done = call(len(times))
        times.append(time.perf_counter() - begin)
        if not is_done:
            raise StoreUnavailable(f"a {operation} failed: is the store full of leased or pinned objects?")
    ordered = sorted(times)
    return Figure(
        operation=operation,
        size_bytes=size_bytes,
        calls=len(times),
        p50_us=ordered[len(times) // 2] * 1e6,
        p99_us=ordered[int(len(times) * 0.99)] * 1e6,
        gb_per_s=size_bytes * len(times) / sum(times) / 1e9,
    )
