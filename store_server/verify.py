"""`mooncake-store verify`: every checksum of what a store that is not running has left on its SSD
paths and its remote."""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from kvcore.errors import ConfigError, KVError
from kvcore.units import format_objects
from kvcore.wire.messages import CheckedLevel, Tier, VerifyReply
from store_server.commands import tell_checked
from store_server.config import StoreConfig
from store_server.remote import RemoteConfig, RemoteTier
from store_server.remote.backend import make_backend
from store_server.remote.check import RemoteCheck
from store_server.ssd import DiskConfig, SsdConfig, SsdTier
from store_server.ssd.block_device import is_block_device, slot_bytes_of

_NO_CAP_BYTES = 1 << 62  # checking must not reclaim anything
_SEGMENT_BYTES = 1 << 20  # for the notes of what was dropped
_ANY_NUMBER = 1 << 62
_POLL_S = 0.1
_CLOSE_GRACE_S = 30.0


def verify_paths(paths: Sequence[Path], *, as_json: bool) -> None:
    """Objects that cannot be read back are dropped, so that they are computed anew. KVError when there were
    any, ConfigError for a path that holds no store or is in use."""
    with _opened(paths) as (tier, failed_paths):
        num_checked, corrupt = _check_ssd(tier)
        size_bytes = tier.stats()["live_bytes"]
    if as_json:
        result = {
            "objects": num_checked,
            "size_bytes": size_bytes,
            "corrupt": [key.hex() for key in corrupt],
            "failed_paths": failed_paths,
        }
        print(json.dumps(result))
    else:
        print(f"{format_objects(num_checked)} checked, {len(corrupt)} corrupt")
    if corrupt:
        raise KVError(f"dropped as corrupt: {format_objects(len(corrupt))} of {num_checked:,}")
    if failed_paths:
        raise KVError(_not_opened(failed_paths))


def verify_levels(config: StoreConfig, *, remote_bytes_per_s: int, as_json: bool) -> None:
    """As `verify_paths`, of all levels that outlive the store. `remote_bytes_per_s`: 0 leaves the remote out.
    The paths stay claimed until the remote is checked, so that no store begins to use them meanwhile."""
    ssd, remote = config.ssd(), config.remote()
    if ssd is None and remote is None:
        raise ConfigError("storage_levels has neither ssd nor remote: a store that is stopped holds nothing")
    levels, troubles = list[CheckedLevel](), list[str]()
    with contextlib.ExitStack() as stack:
        directories: Sequence[Path] = ()
        if ssd is not None:
            tier, failed_paths = stack.enter_context(_opened([disk.path for disk in ssd.disks]))
            num_checked, corrupt = _check_ssd(tier)
            levels.append(CheckedLevel(Tier.SSD, num_checked, num_checked, len(corrupt)))
            troubles += [_not_opened(failed_paths)] if failed_paths else []
            directories = tier.directories
        if remote is not None and remote_bytes_per_s:
            checked, trouble = asyncio.run(_check_remote(remote, directories, remote_bytes_per_s))
            troubles += [trouble] if trouble else []
            if checked is not None:
                levels.append(checked)
    tell_checked(VerifyReply(0, False, levels, 0, "; ".join(troubles)), as_json=as_json)


# ---- SSD -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[tuple[SsdTier, list[str]]]:
    """With the paths that could not be opened."""
    disks = tuple(
        DiskConfig(path=path, capacity_bytes=_NO_CAP_BYTES, segment_bytes=_segment_bytes(path))
        for path in paths
    )
    tier = SsdTier(SsdConfig(disks=disks), notify=lambda: None)
    try:
        yield tier, tier.open(for_service=False).failed_paths
    finally:
        tier.close()


def _check_ssd(tier: SsdTier) -> tuple[int, list[bytes]]:
    with tqdm(total=len(tier), unit=" objects", desc="verifying", disable=None) as bar:
        checked = tier.verify(lambda done, total: bar.update(done - bar.n))
    tier.poll()
    return checked


def _not_opened(paths: Sequence[str]) -> str:
    return f"could not be opened: {', '.join(paths)}"


def _segment_bytes(path: Path) -> int:
    if is_block_device(path):
        slot_bytes = slot_bytes_of(path)
        if slot_bytes is not None:
            return slot_bytes
    elif (path / "lock").exists():
        return _SEGMENT_BYTES
    raise ConfigError(f"{path} is not an SSD path of a store")


# ---- remote --------------------------------------------------------------------------------------------


async def _check_remote(
    config: RemoteConfig, directories: Sequence[Path], bytes_per_s: int
) -> tuple[CheckedLevel | None, str]:
    """With why it could not be checked, or not to its end. Removals noted in `directories` are made up for,
    as by a store that starts."""
    listed = asyncio.Event()
    tier = RemoteTier(config, make_backend(config), lambda: None, listed.set)
    await asyncio.to_thread(tier.read_notes, directories)
    tier.open(0, _ANY_NUMBER)
    listing = asyncio.ensure_future(listed.wait())
    try:
        while tier.is_available and not listing.done():
            await asyncio.wait({listing}, timeout=_POLL_S)
        if tier.trouble:
            return None, tier.trouble
        check = tier.check()
        await _run(check, bytes_per_s)
    finally:
        listing.cancel()
        await tier.close(_CLOSE_GRACE_S)
    return check.level, check.trouble


async def _run(check: RemoteCheck, bytes_per_s: int) -> None:
    running = asyncio.ensure_future(check.run(bytes_per_s))
    try:
        with tqdm(total=check.num_objects, unit=" objects", desc="the remote", disable=None) as bar:
            while not running.done():
                await asyncio.wait({running}, timeout=_POLL_S)
                bar.update(check.num_done - bar.n)
        running.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
