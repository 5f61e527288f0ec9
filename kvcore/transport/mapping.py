"""The store's pool, mapped into this process: fetched once as a descriptor over a Unix socket.

The socket stays open as long as the mapping: its end is the store's proof that the mapping is gone, so it
must never be closed before.
"""

import contextlib
import mmap
import os
import socket
import stat
import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvcore.errors import StoreUnavailable
from kvcore.layout import split_views
from kvcore.transport.checksums import PIECE_BYTES, RunningSums
from kvcore.wire.messages import ShmOffer

# Linux 5.14; fills the page tables ahead, so that no transfer pays for page faults. The pages are there, so
# read faults are enough (they map many at once, and writable). In steps: Python holds its lock meanwhile.
_MADV_POPULATE_READ = 22
_POPULATE_STEP_BYTES = 64 << 20
# Above this numpy copies, which lets other threads run; below, its overhead is more than the copy.
_LARGE_COPY_BYTES = 64 << 10


class PoolMapping:
    """Thread-safe. `using()` keeps the memory mapped while somebody copies."""

    def __init__(self, attachment: socket.socket, memory: mmap.mmap) -> None:
        self.size_bytes = len(memory)
        self._attachment = attachment
        self._memory = memory
        self._view = memoryview(memory)
        self._lock = threading.Lock()
        self._users = 0
        self._closing = False

    @classmethod
    def attach(cls, offer: ShmOffer, timeout_s: float) -> "PoolMapping":
        """StoreUnavailable when the pool cannot be had, with the reason."""
        attachment = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors: list[int] = []
        try:
            attachment.settimeout(timeout_s)
            attachment.connect(offer.attach_path)
            attachment.sendall(offer.nonce)
            _, descriptors, _, _ = socket.recv_fds(attachment, 1, 1)
            if len(descriptors) != 1:
                raise StoreUnavailable("the store did not hand over its pool")
            status = os.fstat(descriptors[0])
            # A device (DAX) does not say its size here; mapping more than it has fails.
            if stat.S_ISREG(status.st_mode) and status.st_size < offer.pool_size_bytes:
                raise StoreUnavailable(
                    f"the pool has {status.st_size} bytes, offered {offer.pool_size_bytes}"
                )
            memory = mmap.mmap(descriptors[0], offer.pool_size_bytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            attachment.close()
            raise StoreUnavailable(f"the pool cannot be mapped: {error}") from error
        except StoreUnavailable:
            attachment.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        attachment.settimeout(None)
        _populate(memory)
        return cls(attachment, memory)

    @contextlib.contextmanager
    def using(self) -> Iterator[memoryview | None]:
        """The pool; None when it is closed already."""
        with self._lock:
            pool = None if self._closing else self._view
            self._users += 1
        try:
            yield pool
        finally:
            with self._lock:
                self._users -= 1
                if self._closing and not self._users:
                    self._unmap()

    def close(self) -> None:
        """Unmaps as soon as nobody copies any more."""
        with self._lock:
            if not self._closing:
                self._closing = True
                if not self._users:
                    self._unmap()

    def abandon_after_fork(self) -> None:
        """In a child process: unmaps without regard to threads, which do not exist here."""
        self._closing = True
        self._unmap()

    def _unmap(self) -> None:
        try:
            self._view.release()
            self._memory.close()
        except BufferError:
            # Somebody still holds a piece of it (a traceback, say): then the store must not believe us gone.
            return
        self._attachment.close()


def copy_from_pool(pool: memoryview, spans: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
    """Fills `views`, one after the other, from the pool's spans (offset, size). The sizes must add up."""
    runs = split_views(views, [size for _, size in spans])
    for (offset, _), run in zip(spans, runs, strict=True):
        for view in run:
            _copy(view, pool[offset : offset + len(view)])
            offset += len(view)


def copy_to_pool(
    pool: memoryview,
    spans: Sequence[tuple[int, int]],
    views: Sequence[memoryview],
    sums: RunningSums | None = None,
) -> None:
    """As the other way round. With `sums` of `views` the bytes are hashed on the way."""
    runs = split_views(views, [size for _, size in spans])
    for (offset, _), run in zip(spans, runs, strict=True):
        for view in run:
            step_bytes = len(view) if sums is None else PIECE_BYTES
            for begin in range(0, len(view), step_bytes):
                piece = view[begin : begin + step_bytes]
                if sums is not None:
                    sums.add(len(piece))
                _copy(pool[offset : offset + len(piece)], piece)
                offset += len(piece)


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < _LARGE_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _populate(memory: mmap.mmap) -> None:
    with contextlib.suppress(OSError):
        for offset in range(0, len(memory), _POPULATE_STEP_BYTES):
            memory.madvise(_MADV_POPULATE_READ, offset, min(_POPULATE_STEP_BYTES, len(memory) - offset))
