"""The transfer engine moves torch tensors. Here they lie on the CPU, and the wire is one of Python
objects."""

import pytest
import torch

from kvcore.errors import ConfigError
from kvcore.transport.engine import Direction, EngineConfig, TransferEngine, TransferRequest, TransferState
from kvcore.transport.verbs_fake import FakeFabric

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_kv_tensor_arrives(dtype: torch.dtype) -> None:
    fabric = FakeFabric("a0", "b0")
    source = torch.randn(2, 64, 16, 8, 32).to(dtype)
    target = torch.zeros_like(source)
    size_bytes = source.numel() * source.element_size()
    with (
        TransferEngine(EngineConfig(device_name="a0", protocol="rdma"), binding=fabric) as here,
        TransferEngine(EngineConfig(device_name="b0", protocol="rdma"), binding=fabric) as there,
    ):
        here.register_tensor(source)
        there.register_tensor(target)
        segment = here.open_segment(there.address)
        request = TransferRequest(Direction.WRITE, source.data_ptr(), segment, target.data_ptr(), size_bytes)
        [status] = here.wait(here.submit_transfer([request]), 60_000)
        assert status.state is TransferState.COMPLETED
        assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))
        with pytest.raises(ConfigError, match="contiguous"):
            here.register_tensor(torch.zeros(4, 6).T)
