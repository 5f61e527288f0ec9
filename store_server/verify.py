"""`mooncake-store verify`: every checksum on the SSD paths of a store that is not running."""

import json
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from kvcore.errors import ConfigError, KVError
from kvcore.units import format_objects
from store_server.ssd import DiskConfig, SsdConfig, SsdTier
from store_server.ssd.block_device import is_block_device, slot_bytes_of

_NO_CAP_BYTES = 1 << 62  # checking must not reclaim anything
_SEGMENT_BYTES = 1 << 20  # for the notes of what was dropped


def verify(paths: Sequence[Path], *, as_json: bool) -> None:
    """Objects that cannot be read back are dropped, so that they are computed anew. KVError when there were
    any, ConfigError for a path that holds no store or is in use."""
    disks = tuple(
        DiskConfig(path=path, capacity_bytes=_NO_CAP_BYTES, segment_bytes=_segment_bytes(path))
        for path in paths
    )
    tier = SsdTier(SsdConfig(disks=disks), notify=lambda: None)
    try:
        report = tier.open(for_service=False)
        with tqdm(total=len(tier), unit=" objects", desc="verifying", disable=None) as bar:
            num_checked, corrupt = tier.verify(lambda done, total: bar.update(done - bar.n))
        size_bytes = tier.stats()["live_bytes"]
        tier.poll()
    finally:
        tier.close()
    if as_json:
        result = {
            "objects": num_checked,
            "size_bytes": size_bytes,
            "corrupt": [key.hex() for key in corrupt],
            "failed_paths": report.failed_paths,
        }
        print(json.dumps(result))
    else:
        print(f"{format_objects(num_checked)} checked, {len(corrupt)} corrupt")
    if corrupt:
        raise KVError(f"dropped as corrupt: {format_objects(len(corrupt))} of {num_checked:,}")
    if report.failed_paths:
        raise KVError(f"could not be opened: {', '.join(report.failed_paths)}")


def _segment_bytes(path: Path) -> int:
    if is_block_device(path):
        slot_bytes = slot_bytes_of(path)
        if slot_bytes is not None:
            return slot_bytes
    elif (path / "lock").exists():
        return _SEGMENT_BYTES
    raise ConfigError(f"{path} is not an SSD path of a store")
