"""KV cache tensors of torch as plain byte arrays."""

from typing import Any

import numpy as np

from kvcore.errors import ConfigError
from mooncake_connector.kv_layout import ByteArray


def host_bytes(name: str, tensor: Any) -> ByteArray:
    """A uint8 view [..., bytes] of a tensor in host memory: same storage, same order of axes, no copy.

    Raises ConfigError for a tensor on a device, whose bytes cannot be reached from here.
    """
    import torch

    if tensor.device.type != "cpu":
        raise ConfigError(
            f"KV cache of {name} lies on {tensor.device}; only KV caches in host memory are moved"
        )
    # Not every dtype has a numpy twin (bfloat16, fp8), bytes always do.
    array: ByteArray = tensor.view(torch.uint8).numpy()
    assert array.dtype == np.uint8
    return array
