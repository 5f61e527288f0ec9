"""`storage_levels`: where KV blocks may live, as a list from fast to slow.

[[storage_levels]]
level = "cpu"
capacity = "64gb"
paths = ["/dev/dax0.0"]    # where that memory is, if not ordinary memory

[[storage_levels]]
level = "ssd"
paths = ["/mnt/nvme0/mooncake", "/dev/nvme1n1"]    # one for each disk: a directory, or a whole block device
capacity = "1tb"                                   # of each path

[[storage_levels]]
level = "remote"
url = "s3://bucket/prefix"                                # or file:///mnt/nfs/kv, redis://host:6379/0
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvcore.units import parse_duration_ms, parse_size_bytes
from store_server.remote import RemoteConfig
from store_server.ssd import DiskConfig, SsdConfig

KNOWN_LEVELS = ("gpu", "cpu", "ssd", "remote")
_FIELDS = {
    "cpu": ("capacity", "paths"),
    "ssd": ("capacity", "paths"),
    "remote": ("capacity", "url", "options", "timeout", "refresh"),
}


class StorageLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`capacity`: "64gb", or bytes; of the SSD it is that of each path. The gpu level is the engine's own and
    may stand in the list for completeness. `paths`: of ssd a directory or block device each, of cpu a DAX
    device or file to map. What belongs to one level only: to remote `url`,
    `options` of its client, `timeout` of one request and `refresh`, the time from one listing to the next;
    its `capacity` may be left out."""

    level: str
    capacity: int | str = 0
    paths: tuple[str, ...] = ()
    url: str = ""
    options: dict[str, str] = {}
    timeout: int | str = "4s"
    refresh: int | str = "60s"


def cpu_capacity_bytes(levels: Sequence[StorageLevel]) -> int | None:
    """None when the list has no cpu level. ConfigError for what makes no sense."""
    _check(levels)
    for level in levels:
        if level.level == "cpu":
            return _capacity_bytes(level)
    return None


def cpu_path(levels: Sequence[StorageLevel]) -> Path | None:
    """What the pool is mapped from; None for ordinary memory."""
    _check(levels)
    return next((Path(level.paths[0]) for level in levels if level.level == "cpu" and level.paths), None)


def ssd_config(levels: Sequence[StorageLevel]) -> SsdConfig | None:
    """None when the list has no ssd level. ConfigError for what makes no sense."""
    _check(levels)
    for level in levels:
        if level.level == "ssd":
            capacity_bytes = _capacity_bytes(level)
            disks = tuple(DiskConfig(path=Path(path), capacity_bytes=capacity_bytes) for path in level.paths)
            for disk in disks:
                disk.effective_segment_bytes()
            return SsdConfig(disks=disks)
    return None


def remote_config(levels: Sequence[StorageLevel]) -> RemoteConfig | None:
    """None when the list has no remote level. ConfigError for what makes no sense."""
    _check(levels)
    for level in levels:
        if level.level == "remote":
            config = RemoteConfig(
                url=level.url,
                options=level.options,
                capacity_bytes=parse_size_bytes(level.capacity),
                timeout_ms=parse_duration_ms(level.timeout),
                refresh_ms=parse_duration_ms(level.refresh),
            )
            config.check()
            return config
    return None


def _check(levels: Sequence[StorageLevel]) -> None:
    names = [level.level for level in levels]
    for level in levels:
        if level.level not in KNOWN_LEVELS:
            raise ConfigError(
                f"storage_levels: level {level.level!r} is not one of {', '.join(KNOWN_LEVELS)}"
            )
        if names.count(level.level) > 1:
            raise ConfigError(f"storage_levels: level {level.level!r} is there more than once")
        if not level.paths and level.level == "ssd":
            raise ConfigError("storage_levels: the ssd level needs `paths`, a directory on each disk")
        if len(level.paths) > 1 and level.level == "cpu":
            raise ConfigError("storage_levels: the cpu level is mapped from one path, not from several")
        if not level.url and level.level == "remote":
            raise ConfigError('storage_levels: the remote level needs a `url`, such as "s3://bucket/prefix"')
        allowed = ("level", *_FIELDS.get(level.level, ("capacity",)))
        defaults = StorageLevel(level=level.level)
        for name in level.__struct_fields__:
            if name not in allowed and getattr(level, name) != getattr(defaults, name):
                raise ConfigError(f"storage_levels: `{name}` is no setting of the {level.level} level")
    paths = [str(Path(path).resolve()) for level in levels for path in level.paths]
    if len(set(paths)) != len(paths):
        raise ConfigError("storage_levels: a path is there more than once")


def _capacity_bytes(level: StorageLevel) -> int:
    capacity_bytes = parse_size_bytes(level.capacity)
    if capacity_bytes <= 0:
        raise ConfigError(f'storage_levels: the {level.level} level needs a capacity, such as "64gb"')
    return capacity_bytes
