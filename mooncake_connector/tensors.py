"""KV cache tensors of torch: what kind of memory they are, and the KVMemory for it."""

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ConfigError
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.host_memory import HostMemory
from mooncake_connector.kv_layout import ByteArray, ByteSpan, KVLayout
from mooncake_connector.kv_memory import KVMemory
from mooncake_connector.staged_memory import StagedMemory


def open_kv_memory(tensors: Mapping[str, Any], num_blocks: int, config: ConnectorConfig) -> KVMemory:
    """`tensors`: layer name -> torch tensor [num_blocks * k, ...], which the result keeps alive.

    Raises ConfigError when they cannot be moved block by block, or staging cannot hold a block.
    """
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        raise ConfigError(f"the layers of the KV cache lie on several devices: {', '.join(devices)}")
    if devices in ([], ["cpu"]) and config.staging == "auto":
        return HostMemory({name: host_bytes(tensor) for name, tensor in tensors.items()}, num_blocks)
    # Only here: unit tests of everything else run without torch.
    from mooncake_connector.torch_device import TorchDevice

    layout = KVLayout({name: tensor_span(name, tensor) for name, tensor in tensors.items()}, num_blocks)
    device = TorchDevice([tensors[name] for name in layout.layer_names], layout)
    return StagedMemory(layout, device, config.load_staging_size_bytes)


def host_bytes(tensor: Any) -> ByteArray:
    """A uint8 view [..., bytes] of a tensor in host memory: same storage, same order of axes, no copy."""
    import torch

    # Not every dtype has a numpy twin (bfloat16, fp8), bytes always do.
    array: ByteArray = tensor.view(torch.uint8).numpy()
    return array


def tensor_span(name: str, tensor: Any) -> ByteSpan:
    """As the span of host_bytes, wherever the tensor lies."""
    *outer, last = tensor.stride()
    if last != 1:
        raise ConfigError(
            f"the innermost axis of {name}'s KV cache is strided: its bytes cannot be moved as runs"
        )
    size = int(tensor.element_size())
    return ByteSpan(
        int(tensor.data_ptr()),
        (*tensor.shape[:-1], tensor.shape[-1] * size),
        (*(stride * size for stride in outer), 1),
    )
