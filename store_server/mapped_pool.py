"""A pool in memory that has a name: a DAX device (CXL or persistent memory, /dev/dax0.0), or a file on a file
system that is memory (fsdax, tmpfs, hugetlbfs). Its content is not kept from one start to the next."""

import fcntl
import mmap
import os
import stat
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.units import format_size
from store_server.pool import Pool

_DEFAULT_ALIGNMENT = 2 << 20  # of a DAX device whose own cannot be read


class MappedPool(Pool):
    """`path` is mapped shared, as much of it as `size_bytes` says. A file is made, and grown to that.

    ConfigError: it cannot be had, is too small, is no memory (a block device), or another store uses it.
    Clients of this host that map a file could shrink it and so end the store by SIGBUS; give a file only
    where they are trusted, or leave shm out of `planes`. A device cannot be shrunk.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if path.exists() else os.O_CREAT)
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise ConfigError(f"storage_levels: {path} cannot be opened: {error.strerror}") from error
        try:
            self._claim()
            self.size_bytes = self._prepare(size_bytes)
            self._memory = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
            self._populate()
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"a pool of {format_size(size_bytes)} in {path}: {error.strerror}") from error
        except ConfigError:
            os.close(self.fd)
            raise
        self.view = memoryview(self._memory)

    def _claim(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is in use by another store") from None

    def _prepare(self, size_bytes: int) -> int:
        """How much of it is mapped."""
        status = os.fstat(self.fd)
        if stat.S_ISREG(status.st_mode):
            size_bytes -= size_bytes % mmap.PAGESIZE
            os.posix_fallocate(self.fd, 0, size_bytes)
            return size_bytes
        return device_bytes(self._path, status, size_bytes)

    def _allocates_first(self) -> bool:
        return False


def device_bytes(
    path: Path, status: os.stat_result, size_bytes: int, sys_devices: Path = Path("/sys/dev/char")
) -> int:
    """What of a DAX device with this status can be mapped, `size_bytes` at most."""
    if not stat.S_ISCHR(status.st_mode):
        raise ConfigError(f"{path} is no DAX device and no file; a disk belongs to the ssd level")
    device = sys_devices / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    room_bytes = _number(device / "size")
    if room_bytes is None:
        raise ConfigError(f"{path} is no DAX device: {device}/size does not say how large it is")
    if size_bytes > room_bytes:
        raise ConfigError(f"{path} has {format_size(room_bytes)}, not {format_size(size_bytes)}")
    alignment = _number(device / "align") or _number(device / "device/align") or _DEFAULT_ALIGNMENT
    return size_bytes - size_bytes % alignment


def open_pool(path: Path | None, size_bytes: int, *, huge_pages: bool) -> Pool:
    """In ordinary memory if there is no path."""
    return MappedPool(path, size_bytes) if path is not None else Pool(size_bytes, huge_pages=huge_pages)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 0)
    except (OSError, ValueError):
        return None
