"""ReplicateConfig and the enumerations in it, with Mooncake's names and defaults."""

import enum
import logging
from typing import Any

from kvcore.client.management import Management
from kvcore.wire.messages import PinKind

logger = logging.getLogger(__name__)

DEFAULT_SOFT_PIN_TTL_MS = 1_800_000
_PLACEMENT = (
    "replica_num",
    "nof_replica_num",
    "dfs_replica_num",
    "preferred_segment",
    "preferred_segments",
    "preferred_nof_segments",
    "group_ids",
)


class SoftPinAction(enum.IntEnum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(enum.IntEnum):
    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicateConfig:
    """How an object is to be kept. Pins are honoured. Everything about placement (several replicas, preferred
    segments, groups) is best effort in Mooncake, too, and means nothing to a store of one node: it is
    accepted, and said once in the log. An attribute that Mooncake does not know is refused."""

    __slots__ = (
        "data_type",
        "dfs_replica_num",
        "group_ids",
        "nof_replica_num",
        "prefer_alloc_in_same_node",
        "preferred_nof_segments",
        "preferred_segment",
        "preferred_segments",
        "replica_num",
        "soft_pin_action",
        "soft_pin_ttl_ms",
        "with_hard_pin",
    )

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.with_hard_pin = False
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.group_ids: list[str] | None = None
        self.data_type = ObjectDataType.UNKNOWN

    def placement(self) -> dict[str, Any]:
        """What was asked for that a store of one node cannot do."""
        plain = ReplicateConfig()
        return {
            name: getattr(self, name) for name in _PLACEMENT if getattr(self, name) != getattr(plain, name)
        }


class Pinner:
    """Pins what was put, and says once what cannot be done."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def apply(self, client: Management, keys: list[bytes], config: ReplicateConfig | None) -> None:
        """For keys that are in the store by now."""
        if config is None:
            return
        for name, value in config.placement().items():
            if name not in self._said:
                self._said.add(name)
                logger.warning("ReplicateConfig.%s=%r has no effect: this store keeps one copy", name, value)
        if not keys:
            return
        ttl_ms = DEFAULT_SOFT_PIN_TTL_MS if config.soft_pin_ttl_ms is None else config.soft_pin_ttl_ms
        if config.with_hard_pin:
            client.batch_pin(keys, PinKind.HARD)
        elif config.soft_pin_action == SoftPinAction.ENABLE:
            client.batch_pin(keys, PinKind.SOFT, ttl_ms=ttl_ms)
        elif config.soft_pin_action == SoftPinAction.DISABLE:
            client.batch_unpin(keys)
