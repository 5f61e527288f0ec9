"""What is measured: a list of cells, each bounded in calls, bytes and seconds. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

KIB = 1 << 10
MIB = 1 << 20

SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB)
QUICK_SIZES_BYTES = (4 * KIB, 64 * KIB, 1 * MIB, 16 * MIB)
BATCH_SIZES_BYTES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
BATCH_KEYS = 32
EXISTS_KEYS = (1, 16, 128, 1000)
EXISTS_VALUE_BYTES = 4 * KIB
MANY_CLIENTS = 4

# A phase's values all stay in the store until they were read, so together they must fit every pool.
MAX_PHASE_BYTES = 256 * MIB
MAX_PHASE_BYTES_PER_MANY_CLIENT = 128 * MIB
POOL_BYTES = 1 << 30
BUFFER_BYTES = 64 * MIB
MANY_CLIENTS_BUFFER_BYTES = 32 * MIB


class Cell(NamedTuple):
    """One figure to measure. `op` is put, get or exists; `num_keys` are the keys of one call."""

    op: str
    size_bytes: int
    num_keys: int
    num_clients: int

    @property
    def call_bytes(self) -> int:
        """Payload of one call (what GB/s counts); nothing moves for exists."""
        return 0 if self.op == "exists" else self.size_bytes * self.num_keys


class Group(NamedTuple):
    """Cells measured one after the other on the same values: put them, get them back, forget them."""

    cells: tuple[Cell, ...]
    max_calls: int


class Budget(NamedTuple):
    """How long it may take. A phase ends at `max_calls` or at `phase_s`, whatever comes first."""

    rounds: int
    phase_s: float
    sizes_bytes: tuple[int, ...]
    max_calls: int


FULL = Budget(rounds=5, phase_s=0.35, sizes_bytes=SIZES_BYTES, max_calls=1000)
QUICK = Budget(rounds=3, phase_s=0.12, sizes_bytes=QUICK_SIZES_BYTES, max_calls=400)


def groups(budget: Budget, num_clients: int) -> Iterator[Group]:
    """All groups of one round for one or many clients."""
    max_bytes = MAX_PHASE_BYTES if num_clients == 1 else MAX_PHASE_BYTES_PER_MANY_CLIENT
    for size_bytes in budget.sizes_bytes:
        yield _put_get(size_bytes, 1, num_clients, budget.max_calls, max_bytes)
    if num_clients > 1:
        return
    for size_bytes in BATCH_SIZES_BYTES:
        if size_bytes in budget.sizes_bytes:
            yield _put_get(size_bytes, BATCH_KEYS, num_clients, budget.max_calls, max_bytes)
    # One set of values for all: the largest question is asked first, so that it puts them.
    exists = tuple(Cell("exists", EXISTS_VALUE_BYTES, n, num_clients) for n in reversed(EXISTS_KEYS))
    yield Group(exists, budget.max_calls)


def _put_get(size_bytes: int, num_keys: int, num_clients: int, max_calls: int, max_bytes: int) -> Group:
    cells = tuple(Cell(op, size_bytes, num_keys, num_clients) for op in ("put", "get"))
    return Group(cells, max(1, min(max_calls, max_bytes // (size_bytes * num_keys))))
