"""The system calls of the SSD tier, in one place so that tests can make disks fail."""

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

log = logging.getLogger(__name__)

_MAX_VECTORS = 1024  # IOV_MAX on Linux
# "No room" rather than "broken". Deleting something of ours helps against the first two only; EFBIG is the
# file size limit of the process or the file system.
RECLAIM_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_ROOM_ERRNOS = RECLAIM_ERRNOS | {errno.EFBIG}
# Our own process ran out of something; the disk is fine and the same call may work later.
TRANSIENT_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class DiskIo:
    """All methods block and are called from disk threads. They raise OSError."""

    def __init__(self) -> None:
        self._refused_direct: set[int] = set()

    def open(self, path: Path, flags: int) -> int:
        """O_DIRECT where the file system takes it; else buffered, with one log line per file system."""
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        device = path.parent.stat().st_dev
        if device not in self._refused_direct:
            self._refused_direct.add(device)
            log.warning(
                "%s: the file system refuses O_DIRECT, reads and writes go through the page cache",
                path.parent,
            )
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Claim the space now: a full disk shows here, not in the middle of a batch."""
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
            os.ftruncate(fd, size_bytes)

    def pwritev(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        return os.pwritev(fd, views, offset_bytes)

    def preadv(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
        return os.preadv(fd, views, offset_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


def write_all(io: DiskIo, fd: int, views: Sequence[memoryview], offset_bytes: int) -> None:
    """Write every byte of the views in order, however the kernel cuts it."""
    _move_all(io.pwritev, fd, views, offset_bytes)


def read_all(io: DiskIo, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int:
    """Fill the views in order; returns the bytes read, fewer only at the end of the file."""
    return _move_all(io.preadv, fd, views, offset_bytes, stop_at_end=True)


def _move_all(
    call: "_Vectored", fd: int, views: Sequence[memoryview], offset_bytes: int, stop_at_end: bool = False
) -> int:
    pending, moved_bytes = [view for view in views if len(view)], 0
    while pending:
        count = call(fd, pending[:_MAX_VECTORS], offset_bytes + moved_bytes)
        if count == 0:
            if stop_at_end:
                break
            raise OSError(errno.EIO, "the disk took no bytes")
        moved_bytes += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
    return moved_bytes


class _Vectored(Protocol):
    def __call__(self, fd: int, views: Sequence[memoryview], offset_bytes: int) -> int: ...
