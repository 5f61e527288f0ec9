"""Memory of GPUs for RDMA: which way a card gets to it, tried in this order.

1. dma-buf: the GPU's driver exports a range as a file descriptor, the card's driver imports it (Linux 5.12,
CUDA 11.7).
   Memory then begins at the offset that the binding says, not at its device address: use the region's
   `address`.
2. peermem: the module nvidia_peermem lets a card take device addresses like those of the host.
3. Neither: bytes go through pinned host memory (mooncake_connector/staged_memory.py), which always works.

Run with CPU tensors and with fakes of the driver; no GPU and no card with GPUDirect have been seen by this
code.
"""

import ctypes
import logging
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvcore.errors import ConfigError
from kvcore.transport.verbs import Device, RdmaUnavailable, Region

logger = logging.getLogger(__name__)

_PEERMEM_MARKS = (
    "/sys/module/nvidia_peermem",
    "/sys/kernel/mm/memory_peers/nvidia-peermem/version",
    "/sys/kernel/mm/memory_peers/nv_mem/version",
)
_CUDA_SUCCESS = 0
_RANGE_HANDLE_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
_ATTRIBUTE_SYNC_MEMOPS = 6  # CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100  # of cuFlushGPUDirectRDMAWrites
# Exported ranges begin and end on pages of the GPU's driver.
_EXPORT_ALIGNMENT = 64 << 10


class StagingNeeded(RdmaUnavailable):
    """No card gets to this memory directly; the text says what was tried and why it did not work."""


class TensorMemory(NamedTuple):
    """Where a tensor's bytes are. `place` as in topology.py: "cuda:1"; empty for host memory."""

    address: int
    size_bytes: int
    place: str

    @property
    def is_host(self) -> bool:
        return not self.place


class Exported(NamedTuple):
    """A dma-buf and where in it the memory begins. The descriptor is the caller's to close."""

    fd: int
    offset: int


class Exporter(Protocol):
    def export(self, address: int, size_bytes: int) -> Exported:
        """RdmaUnavailable when the GPU's driver cannot."""
        ...


def memory_of(tensor: Any) -> TensorMemory:
    """Of anything that looks like a torch tensor. ConfigError when its bytes do not lie in one piece."""
    if not tensor.is_contiguous():
        raise ConfigError("only contiguous tensors can be registered")
    size_bytes = tensor.numel() * tensor.element_size()
    device = tensor.device
    place = "" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
    return TensorMemory(tensor.data_ptr(), size_bytes, place)


def peermem_is_loaded(root: Path = Path("/")) -> bool:
    return any((root / mark.lstrip("/")).exists() for mark in _PEERMEM_MARKS)


def register(
    device: Device, memory: TensorMemory, *, exporter: Exporter | None, has_peermem: bool, remote: bool
) -> Region:
    """Makes a tensor's memory known to one card. `remote`: peers may read and write it.

    StagingNeeded for memory of a GPU that the card does not get to; RdmaUnavailable for host memory it
    refuses.
    """
    if memory.is_host:
        return device.register(memory.address, memory.size_bytes, remote=remote)
    reasons = []
    try:
        return _by_dmabuf(device, memory, exporter, remote)
    except RdmaUnavailable as error:
        reasons.append(f"dma-buf: {error}")
    if has_peermem:
        try:
            return device.register(memory.address, memory.size_bytes, remote=remote)
        except RdmaUnavailable as error:
            reasons.append(f"peermem: {error}")
    else:
        reasons.append("peermem: the module nvidia_peermem is not loaded")
    raise StagingNeeded(f"{device.name} does not get to memory of {memory.place}: {'; '.join(reasons)}")


def _by_dmabuf(device: Device, memory: TensorMemory, exporter: Exporter | None, remote: bool) -> Region:
    if exporter is None:
        raise RdmaUnavailable("nothing exports memory of this kind of device")
    exported = exporter.export(memory.address, memory.size_bytes)
    try:
        return device.register_dmabuf(
            exported.fd, exported.offset, memory.size_bytes, memory.address, remote=remote
        )
    finally:
        # The registration holds on to the memory by itself.
        os.close(exported.fd)


class CudaExporter:
    """NVIDIA's driver. `driver`: its library, libcuda.so.1 if not given; RdmaUnavailable without one."""

    def __init__(self, driver: Any = None) -> None:
        try:
            self._driver = driver if driver is not None else ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RdmaUnavailable(f"no CUDA driver: {error}") from error

    def export(self, address: int, size_bytes: int) -> Exported:
        self._order_copies(address)
        alignment = max(_EXPORT_ALIGNMENT, mmap.PAGESIZE)
        begin = address - address % alignment
        end = -(-(address + size_bytes) // alignment) * alignment
        fd = ctypes.c_int(-1)
        code = self._driver.cuMemGetHandleForAddressRange(
            ctypes.byref(fd),
            ctypes.c_uint64(begin),
            ctypes.c_size_t(end - begin),
            ctypes.c_int(_RANGE_HANDLE_DMA_BUF_FD),
            ctypes.c_ulonglong(0),
        )
        if code != _CUDA_SUCCESS or fd.value < 0:
            raise RdmaUnavailable(f"cuMemGetHandleForAddressRange says {code}")
        return Exported(fd.value, address - begin)

    def flush_writes(self) -> None:
        """After a card has written to this process's GPU memory, before kernels read it. RdmaUnavailable when
        the driver cannot: the GPU might then see old bytes."""
        code = self._driver.cuFlushGPUDirectRDMAWrites(
            ctypes.c_int(_FLUSH_CURRENT_CONTEXT), ctypes.c_int(_FLUSH_TO_OWNER)
        )
        if code != _CUDA_SUCCESS:
            raise RdmaUnavailable(f"cuFlushGPUDirectRDMAWrites says {code}")

    def _order_copies(self, address: int) -> None:
        """Copies of the CUDA runtime return only when they are done, as the card cannot know of streams."""
        one = ctypes.c_uint(1)
        code = self._driver.cuPointerSetAttribute(
            ctypes.byref(one), ctypes.c_int(_ATTRIBUTE_SYNC_MEMOPS), ctypes.c_uint64(address)
        )
        if code != _CUDA_SUCCESS:
            raise RdmaUnavailable(f"cuPointerSetAttribute says {code}: not memory of the CUDA driver?")


def find_exporter(memory: TensorMemory) -> Exporter | None:
    """Whatever exports memory of this kind on this machine."""
    if not memory.place.startswith("cuda"):
        return None
    try:
        return CudaExporter()
    except RdmaUnavailable as error:
        logger.debug("dma-buf is no way: %s", error)
        return None
