"""Mooncake's `protocol` and `device_name`, as its users write them, in terms of our planes."""

import json
from collections.abc import Sequence

from kvcore.errors import ConfigError

AUTO = "auto"
PLANES = {
    AUTO: ("rdma", "shm", "tcp"),
    "rdma": ("rdma", "shm", "tcp"),
    "shm": ("shm", "tcp"),
    "tcp": ("tcp",),
}
"""By protocol, best first. A plane that does not work here gives way to the next one, with a reason in the
log."""


def planes_of(protocol: str, planes: Sequence[str] = ()) -> tuple[str, ...]:
    """`planes` if there are any, else those of the protocol; "" is AUTO. ConfigError for one that is not
    ours."""
    if planes:
        return tuple(planes)
    try:
        return PLANES[protocol or AUTO]
    except KeyError:
        raise ConfigError(f"protocol {protocol!r} is not one of {', '.join(PLANES)}") from None


def device_of_rank(device_name: str, rank: int) -> str:
    """`device_name` may be an object that gives each rank its own: {"0": "mlx5_0", "1": "mlx5_1"}, as
    SGLang's users write it. ConfigError for an object without this rank, or with other than names."""
    if not device_name.lstrip().startswith("{"):
        return device_name
    try:
        by_rank = json.loads(device_name)
    except ValueError as error:
        raise ConfigError(f"device_name {device_name!r}: not JSON: {error}") from error
    found = by_rank.get(str(rank))
    if not isinstance(found, str):
        raise ConfigError(f"device_name {device_name!r} names no device for rank {rank}")
    return found
