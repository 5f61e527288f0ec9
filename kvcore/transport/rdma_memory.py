"""Memory of this process that RDMA devices may touch: what callers have registered, and a buffer that
everything else goes through."""

import bisect
import mmap
import threading
from collections import deque

import numpy as np

PAGE_BYTES = 4096


def address_of(view: memoryview) -> int:
    """Of its first byte; the view keeps the memory where it is."""
    if not len(view):
        return 0
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


class Registered:
    """A range that every device knows under a key of its own; None where a device has refused it."""

    __slots__ = ("begin", "end", "keys")

    def __init__(self, begin: int, size_bytes: int, keys: list[int | None]) -> None:
        self.begin = begin
        self.end = begin + size_bytes
        self.keys = keys


class MemoryMap:
    """Finds the registration that covers an address. Any thread may look things up while others change
    them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced as a whole, so that lookups need no lock.
        self._sorted: tuple[list[int], list[Registered]] = ([], [])

    @property
    def entries(self) -> list[Registered]:
        return list(self._sorted[1])

    def add(self, entry: Registered) -> None:
        with self._lock:
            entries = [*self._sorted[1], entry]
            self._replace(entries)

    def remove(self, entry: Registered) -> None:
        with self._lock:
            self._replace([other for other in self._sorted[1] if other is not entry])

    def find(self, address: int, size_bytes: int) -> Registered | None:
        begins, entries = self._sorted
        end = address + size_bytes
        for index in range(bisect.bisect_right(begins, address) - 1, -1, -1):
            if end <= entries[index].end:
                return entries[index]
        return None

    def _replace(self, entries: list[Registered]) -> None:
        entries.sort(key=lambda entry: entry.begin)
        self._sorted = ([entry.begin for entry in entries], entries)


class Ranges:
    """Hands out contiguous ranges of [0, size_bytes), whole pages, first fit. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._free = [(0, size_bytes)]

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for begin, end in self._free)

    def take(self, size_bytes: int) -> int | None:
        """The offset of the range; None: there is no room."""
        wanted = _whole_pages(size_bytes)
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= wanted:
                if end - begin == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (begin + wanted, end)
                return begin
        return None

    def give_back(self, offset: int, size_bytes: int) -> None:
        begin, end = offset, offset + _whole_pages(size_bytes)
        index = bisect.bisect_left(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


class Room:
    """A loan of the bounce buffer; it ends with `close`, or when nobody refers to it any more."""

    __slots__ = ("_bounce", "_offset", "address", "view")

    def __init__(self, bounce: "BounceBuffer", offset: int, size_bytes: int) -> None:
        self._bounce: BounceBuffer | None = bounce
        self._offset = offset
        self.address = bounce.address + offset
        self.view = bounce.memory[offset : offset + size_bytes]

    def close(self) -> None:
        bounce, self._bounce = self._bounce, None
        if bounce is not None:
            # No lock here: a finalizer runs wherever it likes.
            bounce.returned.append((self._offset, len(self.view)))

    def __del__(self) -> None:
        self.close()


class BounceBuffer:
    """Memory that is copied through because what the caller gave is not registered. Registering that on the
    fly would be worse than slow: a registration outlives `free`, and the device would go on with the old
    pages. Thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.memory = memoryview(mmap.mmap(-1, size_bytes))
        self.address = address_of(self.memory)
        self.returned: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()
        self._ranges = Ranges(size_bytes)

    def take(self, size_bytes: int) -> Room | None:
        with self._lock:
            self._collect()
            offset = self._ranges.take(size_bytes)
            return None if offset is None else Room(self, offset, size_bytes)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._collect()
            return self._ranges.free_bytes

    def _collect(self) -> None:
        while self.returned:
            self._ranges.give_back(*self.returned.popleft())


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
