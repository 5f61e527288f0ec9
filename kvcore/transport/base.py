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


def check_batch(batch: ReadBatch | WriteBatch) -> None:
    """ValueError for a batch no plane could carry out, whatever the store holds."""
    if len(batch.keys) != len(batch.buffers):
        raise ValueError(f"{len(batch.keys)} keys but {len(batch.buffers)} buffers")
    if batch.layer_begin < 0 or not (batch.layer_end > batch.layer_begin or batch.layer_end == 0):
        raise ValueError(f"no layers in [{batch.layer_begin}, {batch.layer_end})")
    if isinstance(batch, WriteBatch):
        if batch.layer_end == 0:
            raise ValueError("a write names its layers: layer_end must be at least 1")
        expected = len(batch.keys) * (batch.layer_end - batch.layer_begin)
        if len(batch.checksums) not in (0, expected):
            raise ValueError(f"{len(batch.checksums)} checksums for {expected} (key, layer) pairs")


class Transfer(Protocol):
    """A submitted batch. `wait` may be called more than once and returns the same list; any thread may wait,
    one at a time."""

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
        """Starts moving and never waits for an answer: the request is sent (a large write's bytes with it) by
        the calling thread, and the bytes of a read move while somebody waits for it or asks `done()`.
        Several transfers may be in flight. ValueError for a batch that makes no sense (check_batch)."""
        ...

    def close(self) -> None:
        """Fails what is in flight with UNAVAILABLE and gives buffers back."""
        ...
