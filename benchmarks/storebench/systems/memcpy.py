"""The machine's memory: one copy between two buffers of one process, the floor under every plane."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from storebench.clients import ClientSpec
from storebench.driver import Bytes, touched
from storebench.plan import MAX_PHASE_BYTES, Cell


class Memcpy:
    name = "memcpy"
    about = "one copy inside one process, no store: what the memory gives"

    def start(self, work_dir: Path) -> None:
        pass

    def stop(self) -> None:
        pass

    @property
    def server_pids(self) -> list[int]:
        return []

    def client(self) -> ClientSpec:
        return ClientSpec("storebench.systems.memcpy:MemcpyDriver", {"arena_bytes": MAX_PHASE_BYTES})

    def measures(self, cell: Cell) -> bool:
        return cell.op != "exists"


class MemcpyDriver:
    """Values land one after the other in an arena larger than the caches, as in a store's pool."""

    def __init__(self, arena_bytes: int) -> None:
        self._arena = touched(arena_bytes)
        self._offsets: dict[bytes, int] = {}
        self._end = 0
        self._buffers: list[Bytes] = []

    def allocate(self, size_bytes: int) -> Bytes:
        self._buffers.append(touched(size_bytes))
        return self._buffers[-1]

    def make_key(self, digest: bytes) -> bytes:
        return digest

    def put(self, key: bytes, offset: int, size_bytes: int) -> bool:
        self._offsets[key] = self._end
        self._end += size_bytes
        np.copyto(self._arena[self._end - size_bytes : self._end], self._buffers[0][offset:][:size_bytes])
        return True

    def get(self, key: bytes, offset: int, size_bytes: int) -> bool:
        at = self._offsets[key]
        np.copyto(self._buffers[1][offset : offset + size_bytes], self._arena[at : at + size_bytes])
        return True

    def batch_put(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        return all(self.put(key, offset, size_bytes) for key, offset in zip(keys, offsets, strict=True))

    def batch_get(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        return all(self.get(key, offset, size_bytes) for key, offset in zip(keys, offsets, strict=True))

    def exists(self, keys: Sequence[bytes]) -> bool:
        return all(key in self._offsets for key in keys)

    def clear(self) -> None:
        self._offsets.clear()
        self._end = 0

    def close(self) -> None:
        pass
