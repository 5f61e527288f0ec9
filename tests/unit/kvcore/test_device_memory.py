"""Which way a card gets to memory of a GPU, with drivers that are fakes."""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ConfigError
from kvcore.transport.device_memory import (
    CudaExporter,
    Exported,
    StagingNeeded,
    TensorMemory,
    memory_of,
    peermem_is_loaded,
    register,
)
from kvcore.transport.engine import Direction, EngineConfig, TransferEngine, TransferRequest, TransferState
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.transport.verbs_fake import FakeFabric

GPU = TensorMemory(0x7F00_0001_2340, 100_000, "cuda:1")


class FakeTensor:
    """Looks like a torch tensor; its memory is that of an array."""

    def __init__(self, array: np.ndarray, kind: str = "cpu", index: int | None = None) -> None:
        self.array = array
        self.device = SimpleNamespace(type=kind, index=index)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


class FakeCard:
    """Takes what it is told to take, and says how it was asked."""

    name = "mlx5_0"

    def __init__(self, *takes: str) -> None:
        self.takes = takes
        self.asked: list[tuple[Any, ...]] = []

    def register(self, address: int, size_bytes: int, *, remote: bool) -> str:
        self.asked.append(("plain", address, size_bytes, remote))
        if "plain" not in self.takes:
            raise RdmaUnavailable("bad address")
        return "plain region"

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool) -> str:
        os.fstat(fd)
        self.asked.append(("dma-buf", offset, size_bytes, address, remote))
        if "dma-buf" not in self.takes:
            raise RdmaUnavailable("operation not supported")
        return "dma-buf region"


class FakeExporter:
    def __init__(self) -> None:
        self.fds: list[int] = []

    def export(self, address: int, size_bytes: int) -> Exported:
        self.fds.append(os.open("/dev/null", os.O_RDONLY))
        return Exported(self.fds[-1], 0x340)


class FakeCuda:
    """The three calls of the driver; `codes` are what they return."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] = tuple(getattr(value, "value", value) for value in arguments)
            if name == "cuMemGetHandleForAddressRange" and not self.codes.get(name):
                arguments[0]._obj.value = 77
            return self.codes.get(name, 0)

        return call


def make_known(card: FakeCard, memory: TensorMemory, exporter: Any = None, has_peermem: bool = False) -> Any:
    return register(card, memory, exporter=exporter, has_peermem=has_peermem, remote=True)  # type: ignore[arg-type]


def test_dma_buf_comes_first_and_its_descriptor_is_closed() -> None:
    card, exporter = FakeCard("dma-buf", "plain"), FakeExporter()
    assert make_known(card, GPU, exporter, has_peermem=True) == "dma-buf region"
    assert card.asked == [("dma-buf", 0x340, GPU.size_bytes, GPU.address, True)]
    with pytest.raises(OSError):
        os.fstat(exporter.fds[0])


def test_peermem_is_second_and_takes_the_device_address() -> None:
    card, exporter = FakeCard("plain"), FakeExporter()
    assert make_known(card, GPU, exporter, has_peermem=True) == "plain region"
    assert card.asked[1] == ("plain", GPU.address, GPU.size_bytes, True)
    with pytest.raises(OSError):
        os.fstat(exporter.fds[0])


def test_what_was_tried_is_said_when_nothing_works() -> None:
    with pytest.raises(StagingNeeded) as refused:
        make_known(FakeCard(), GPU, FakeExporter(), has_peermem=True)
    assert str(refused.value) == (
        "mlx5_0 does not get to memory of cuda:1: dma-buf: operation not supported; peermem: bad address"
    )
    with pytest.raises(StagingNeeded, match=r"nothing exports.*not loaded"):
        make_known(FakeCard("plain"), GPU)


def test_host_memory_goes_the_plain_way_and_only_that() -> None:
    host = GPU._replace(place="")
    card = FakeCard("plain")
    assert make_known(card, host, FakeExporter()) == "plain region" and len(card.asked) == 1
    with pytest.raises(RdmaUnavailable) as refused:
        make_known(FakeCard("dma-buf"), host, FakeExporter())
    assert not isinstance(refused.value, StagingNeeded)


def test_cuda_exports_whole_pages_and_says_where_the_memory_begins() -> None:
    driver = FakeCuda()
    assert CudaExporter(driver).export(GPU.address, GPU.size_bytes) == Exported(77, 0x2340)
    _, begin, size_bytes, kind, flags = driver.calls["cuMemGetHandleForAddressRange"]
    assert begin == 0x7F00_0001_0000 and size_bytes == 2 * 65536 and (kind, flags) == (1, 0)
    _, attribute, address = driver.calls["cuPointerSetAttribute"]
    assert (attribute, address) == (6, GPU.address)


@pytest.mark.parametrize("name", ["cuMemGetHandleForAddressRange", "cuPointerSetAttribute"])
def test_a_driver_that_refuses_is_quoted(name: str) -> None:
    with pytest.raises(RdmaUnavailable, match=f"{name} says 801"):
        CudaExporter(FakeCuda(**{name: 801})).export(GPU.address, GPU.size_bytes)


def test_writes_of_cards_are_flushed_or_it_is_said() -> None:
    driver = FakeCuda()
    CudaExporter(driver).flush_writes()
    assert driver.calls["cuFlushGPUDirectRDMAWrites"] == (0, 100)
    with pytest.raises(RdmaUnavailable, match=r"Flush.* says 801"):
        CudaExporter(FakeCuda(cuFlushGPUDirectRDMAWrites=801)).flush_writes()


def test_no_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RdmaUnavailable, match=r"no CUDA driver: libcuda\.so\.1"):
        CudaExporter()


def test_peermem_is_seen_in_sysfs(tmp_path: Path) -> None:
    assert not peermem_is_loaded(tmp_path)
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert peermem_is_loaded(tmp_path)


def test_where_a_tensor_is() -> None:
    array = np.zeros((4, 6), np.float32)
    assert memory_of(FakeTensor(array)) == TensorMemory(int(array.ctypes.data), 96, "")
    assert memory_of(FakeTensor(array, "cuda", 3)).place == "cuda:3"
    assert memory_of(FakeTensor(array, "cuda")).place == "cuda:0"
    with pytest.raises(ConfigError, match="contiguous"):
        memory_of(FakeTensor(array.T))


def test_a_cpu_tensor_is_moved_by_the_engine() -> None:
    fabric = FakeFabric("a0", "b0")
    one = FakeTensor(np.arange(1000, dtype=np.float32))
    other = FakeTensor(np.zeros(1000, np.float32))
    with (
        TransferEngine(EngineConfig(device_name="a0", protocol="rdma"), binding=fabric) as here,
        TransferEngine(EngineConfig(device_name="b0", protocol="rdma"), binding=fabric) as there,
    ):
        here.register_tensor(one)
        there.register_tensor(other)
        segment = here.open_segment(there.address)
        request = TransferRequest(Direction.WRITE, one.data_ptr(), segment, other.data_ptr(), 4000)
        [status] = here.wait(here.submit_transfer([request]), 60_000)
        assert status.state is TransferState.COMPLETED and (one.array == other.array).all()


def test_gpu_memory_that_nothing_reaches_asks_for_staging() -> None:
    gpu = FakeTensor(np.zeros(16, np.float32), "cuda", 0)
    with (
        TransferEngine(EngineConfig(device_name="a0", protocol="rdma"), binding=FakeFabric("a0")) as engine,
        pytest.raises(StagingNeeded, match="a0 does not get to memory of cuda:0"),
    ):
        engine.register_tensor(gpu)
    with (
        TransferEngine(EngineConfig(protocol="tcp")) as engine,
        pytest.raises(StagingNeeded, match="over tcp"),
    ):
        engine.register_tensor(gpu)
