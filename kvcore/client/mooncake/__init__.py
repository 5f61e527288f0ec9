"""Mooncake's store API over ours: existing code runs by changing one import.

-from mooncake.store import MooncakeDistributedStore, ReplicateConfig
+from kvcore.client.mooncake import MooncakeDistributedStore, ReplicateConfig

Names, results and error codes are those of Mooncake 0.3.13. What is different stands in docs/mooncake_api.md.
"""

from kvcore.client.mooncake.codes import MooncakeError
from kvcore.client.mooncake.memory import BufferHandle
from kvcore.client.mooncake.replicas import ObjectDataType, ReplicateConfig, SoftPinAction
from kvcore.client.mooncake.store import MooncakeDistributedStore

__all__ = [
    "BufferHandle",
    "MooncakeDistributedStore",
    "MooncakeError",
    "ObjectDataType",
    "ReplicateConfig",
    "SoftPinAction",
]
