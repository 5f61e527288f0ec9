"""The transfer engine's interface: move layers of objects between buffers here and the store's pool.

One contract for every plane (tests/contracts/transport_contract.py runs against tcp, shm, rdma and fake).
A batch names objects by key, so that a plane is free in how it moves bytes: tcp streams them behind Read and
Write frames, shm copies through the mapped pool between Acquire and Release, rdma posts one-sided chains.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvcore.wire.messages import Status

Buffer = Any  # a contiguous C-order object with the buffer protocol (memoryview, numpy array, bytearray)


class Region(Protocol):
    """A registered piece of memory. tcp and shm need no registration; rdma pins it and holds its keys."""

    @property
    def size_bytes(self) -> int: ...

    def close(self) -> None:
        """Ends the registration. The memory itself stays the caller's."""
        ...


class ReadBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Read layers [layer_begin, layer_end) of keys[i] into buffers[i].

    buffers[i] is one writable buffer, or a sequence of them whose concatenation takes the bytes (an engine's
    layers lie in different tensors). layer_end 0 means all layers. The buffers belong to the plane from
    submit until the transfer is done, also when it fails. With a status other than OK a buffer's content is
    undefined (but only ever bytes of that object or what was there before).
    """

    keys: Sequence[bytes]
    buffers: Sequence[Any]
    layer_begin: int = 0
    layer_end: int = 0
    wait_ms: int = 0


class WriteBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Write and commit layers [layer_begin, layer_end) of reserved objects from buffers[i] (as in ReadBatch).

    `checksums`: xxh3-64, key-major, one a (key, layer); empty: the plane computes them if it is set to.
    """

    keys: Sequence[bytes]
    buffers: Sequence[Any]
    layer_begin: int
    layer_end: int
    checksums: Sequence[int] = ()


class Transfer(Protocol):
    """A submitted batch. Thread-safe; `wait` may be called more than once and returns the same list."""

    def done(self) -> bool: ...

    def wait(self, timeout_ms: float | None = None) -> list[Status]:
        """One Status a key. Never raises for what a peer or the network did: that is Status.UNAVAILABLE,
        a passed deadline is Status.TIMED_OUT. After TIMED_OUT the buffers are the caller's again (the plane
        will not write to them any more)."""
        ...


class Transport(Protocol):
    """One plane to one store. All methods may be called from any thread."""

    name: str

    def register(self, buffer: Buffer) -> Region: ...

    def submit(self, batch: ReadBatch | WriteBatch) -> Transfer:
        """Starts moving; never blocks on the peer. Several transfers may be in flight."""
        ...

    def close(self) -> None:
        """Fails what is in flight with UNAVAILABLE and gives buffers back."""
        ...
