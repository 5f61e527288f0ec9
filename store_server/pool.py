"""The pool: one memfd, all of it taken at start, mapped here and by clients of the same host."""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from kvcore.errors import ConfigError
from kvcore.units import format_size

logger = logging.getLogger(__name__)

_POPULATE_STEP_BYTES = 256 << 20
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it
_SHMEM_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class Pool:
    """`view` is writable memory of `size_bytes`; `fd` may be handed to clients, who cannot resize it."""

    def __init__(self, size_bytes: int, *, huge_pages: bool = False) -> None:
        """Takes all its memory at once: a first touch costs ten times a copy, and running out of memory must
        happen now and not in the middle of a put. ConfigError when there is not enough."""
        unit = _HUGE_PAGE_BYTES if huge_pages else mmap.PAGESIZE
        self.size_bytes = size_bytes - size_bytes % unit
        if not huge_pages:
            check_available(self.size_bytes)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
        self.fd = os.memfd_create("mooncake-store-pool", flags)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            # A client that shrank the file would kill the store by SIGBUS.
            fcntl.fcntl(
                self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            )
            self._memory = mmap.mmap(self.fd, self.size_bytes, mmap.MAP_SHARED)
            if not huge_pages:
                self._advise_huge_pages()
            self._populate()
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(_explain(error, self.size_bytes, huge_pages)) from error
        self.view = memoryview(self._memory)

    def close(self) -> None:
        """Unmaps. Views of the pool that somebody still holds keep the memory until they are gone."""
        os.close(self.fd)
        try:
            self.view.release()
            self._memory.close()
        except BufferError:
            logger.debug("the pool is unmapped when the last view of it is gone")

    def _advise_huge_pages(self) -> None:
        try:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            logger.debug("no transparent huge pages for the pool", extra={"reason": error.strerror})

    def _populate(self) -> None:
        allocates_first = self._allocates_first()
        # None: only where somebody can watch it.
        quiet = True if self.size_bytes <= _POPULATE_STEP_BYTES else None
        total = self.size_bytes
        with tqdm(total=total, unit="B", unit_scale=True, desc="taking memory", disable=quiet) as bar:
            for offset in range(0, total, _POPULATE_STEP_BYTES):
                step = min(_POPULATE_STEP_BYTES, total - offset)
                if allocates_first:
                    os.posix_fallocate(self.fd, offset, step)
                self._fault_in(offset, step)
                bar.update(step)

    def _allocates_first(self) -> bool:
        """Faults that allocate are slower than allocating first, but only they get transparent huge pages."""
        return "[advise]" not in _read(_SHMEM_HUGE_PAGES)

    def _fault_in(self, offset: int, size_bytes: int) -> None:
        try:
            self._memory.madvise(_MADV_POPULATE_WRITE, offset, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # A kernel before 5.14. The memory is taken now, page tables fill as they are used.
            os.posix_fallocate(self.fd, offset, size_bytes)


def check_available(size_bytes: int) -> None:
    """ConfigError when a pool of this size cannot be had. A memfd grows until the kernel kills somebody, so
    the limit is looked at before."""
    available = available_bytes()
    if available is not None and size_bytes > available:
        raise ConfigError(
            f"a pool of {format_size(size_bytes)} does not fit: {format_size(available)} of memory are "
            "available. Choose a smaller --pool-size-bytes, or raise the memory limit of the container"
        )


def available_bytes(read: Callable[[str], str] | None = None) -> int | None:
    """Memory that can still be taken: of the machine, or of the control group if that is less."""
    read = read or _read
    found = []
    for line in read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = read("/sys/fs/cgroup/memory.max").strip(), read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        reclaimable = 0
        for line in read("/sys/fs/cgroup/memory.stat").splitlines():
            if line.startswith("inactive_file "):
                reclaimable = int(line.split()[1])
        found.append(int(limit) - int(used) + reclaimable)
    return min(found, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _explain(error: OSError, size_bytes: int, huge_pages: bool) -> str:
    if huge_pages and error.errno in (errno.ENOMEM, errno.ENOSPC):
        pages = -(-size_bytes // _HUGE_PAGE_BYTES)
        return (
            f"no {pages} huge pages are free for a pool of {format_size(size_bytes)}: reserve them with "
            f"`sysctl vm.nr_hugepages={pages}`, or leave out --huge-pages"
        )
    return f"the pool of {format_size(size_bytes)} cannot be had: {error.strerror or error}"
