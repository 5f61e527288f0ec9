"""The namespace of one rank's KV blocks: everything that must be equal for two engines to share bytes.

Computed by each rank from its real tensors, and handed to the scheduler side as a digest, so that one and the
same recipe names blocks for lookup, load and save.
"""

import msgspec

from kvcore.errors import ConfigError
from kvcore.keys import Namespace
from kvcore.weights import weights_identity
from mooncake_connector.config import ConnectorConfig
from mooncake_connector.kv_layout import KVLayout


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What compat.py reads from vLLM about this rank.

    `engine` holds settings outside the checkpoint that change KV values (compute dtype, quantization, config
    overrides), `layout` the attention backend's byte order inside a block (on CPU with its ISA packing).
    `kv_replicas`: how many consecutive TP ranks hold identical KV (MLA: all of them).
    """

    architecture: str
    model_path: str
    engine: str
    layout: str
    kv_dtype: str
    hash_scheme: str
    block_size_tokens: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_size: int = 1
    kv_replicas: int = 1

    @property
    def writes(self) -> bool:
        """Of ranks that hold identical KV only the first one saves it."""
        return self.tp_rank % self.kv_replicas == 0


def build_namespace(facts: EngineFacts, layout: KVLayout, config: ConnectorConfig) -> Namespace:
    """Raises ConfigError when the weights cannot be told apart from others'."""
    weights_id = config.weights_id or weights_identity(facts.model_path)
    if not weights_id:
        raise ConfigError(
            f"the weights of {facts.model_path!r} cannot be identified: set weights_id in "
            "kv_connector_extra_config to a name that changes whenever the weights do"
        )
    return Namespace(
        model=facts.architecture,
        weights_id=weights_id,
        kv_dtype=facts.kv_dtype,
        engine=facts.engine,
        engine_layout=f"{facts.layout} {layout.describe()}",
        hash_scheme=facts.hash_scheme,
        block_size_tokens=facts.block_size_tokens,
        block_size_bytes=layout.block_size_bytes,
        num_layers=layout.num_layers,
        tp_rank=facts.tp_rank // facts.kv_replicas,
        tp_size=facts.tp_size // facts.kv_replicas,
        pp_rank=facts.pp_rank,
        pp_size=facts.pp_size,
        # vLLM's decode context parallel groups are consecutive TP ranks.
        cp_rank=facts.tp_rank % facts.cp_size,
        cp_size=facts.cp_size,
        tenant=config.tenant,
    )
