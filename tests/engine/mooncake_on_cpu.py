"""vLLM's MooncakeConnector for engines on CPU, which use it by `kv_connector_module_path`.

When it starts it asks torch which accelerator to bind its threads to, and torch has none to name; on CPU
vLLM's binding does nothing. Everything else of it, and Mooncake's engine over TCP, works with host memory.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

torch.accelerator.current_device_index = lambda: 0


class MooncakeConnectorOnCpu(MooncakeConnector):
    """The same, under a name that can be given."""
