"""Registered memory: which addresses may take part in transfers, and through which cards."""

import bisect
import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping

from kvcore.errors import ConfigError, LocalProtocolError
from kvcore.transport.engine.messages import RemoteKey, RemoteMemory
from kvcore.transport.verbs import Region


class LocalMemory:
    """One registration. `owner` keeps the memory alive; `regions` are its registrations by card."""

    def __init__(
        self,
        address: int,
        size_bytes: int,
        place: str,
        *,
        is_host: bool,
        regions: Mapping[str, Region],
        owner: object,
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.place = place
        self.is_host = is_host
        self.regions = regions
        self.users = 0
        self._owner = owner

    @property
    def end(self) -> int:
        return self.address + self.size_bytes

    def view(self, address: int, size_bytes: int) -> memoryview:
        """Its bytes, writable; only of memory that the CPU reaches."""
        return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")

    def describe(self) -> RemoteMemory:
        keys = {card: RemoteKey(region.remote_key, region.address) for card, region in self.regions.items()}
        return RemoteMemory(self.address, self.size_bytes, self.place, self.is_host, keys)

    def close(self) -> None:
        for region in self.regions.values():
            region.close()
        self._owner = None


class MemoryTable:
    """All registrations, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._memories: list[LocalMemory] = []

    def add(self, memory: LocalMemory) -> None:
        """ConfigError when some of it is registered already."""
        with self._lock:
            position = bisect.bisect_right(self._starts, memory.address)
            before, after = self._memories[:position], self._memories[position:]
            if (before and before[-1].end > memory.address) or (after and after[0].address < memory.end):
                raise ConfigError(f"memory at {memory.address:#x} is registered already, or a part of it")
            self._starts.insert(position, memory.address)
            self._memories.insert(position, memory)

    def remove(self, address: int) -> LocalMemory:
        """LocalProtocolError: nothing begins there, or transfers are using it."""
        with self._lock:
            position = bisect.bisect_left(self._starts, address)
            if position == len(self._starts) or self._starts[position] != address:
                raise LocalProtocolError(f"no registered memory begins at {address:#x}")
            memory = self._memories[position]
            if memory.users:
                raise LocalProtocolError(
                    f"{memory.users} transfers use the memory at {address:#x}: wait for them"
                )
            del self._starts[position], self._memories[position]
            return memory

    def take(self, address: int, size_bytes: int) -> LocalMemory | None:
        """The registration that covers these bytes, which stays until `give`; None when there is none."""
        with self._lock:
            position = bisect.bisect_right(self._starts, address) - 1
            if position < 0 or address + size_bytes > self._memories[position].end:
                return None
            memory = self._memories[position]
            memory.users += 1
            return memory

    def give(self, memory: LocalMemory) -> None:
        with self._lock:
            memory.users -= 1

    @contextlib.contextmanager
    def using(self, address: int, size_bytes: int) -> Iterator[memoryview | None]:
        """The bytes, if they are registered memory that the CPU reaches."""
        memory = self.take(address, size_bytes)
        try:
            yield memory.view(address, size_bytes) if memory is not None and memory.is_host else None
        finally:
            if memory is not None:
                self.give(memory)

    def describe(self) -> list[RemoteMemory]:
        with self._lock:
            return [memory.describe() for memory in self._memories]

    def clear(self) -> list[LocalMemory]:
        with self._lock:
            memories, self._memories, self._starts = self._memories, [], []
            return memories
