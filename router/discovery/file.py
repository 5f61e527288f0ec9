"""Engines listed in a file that is looked at again and again: an editor, a ConfigMap or a script changes it.

    engines = [
        {url = "http://10.0.0.1:8000", role = "prefill", bootstrap_port = 8998},
        {url = "http://10.0.0.2:8000", role = "decode", kv_events = "tcp://10.0.0.2:5557"},
    ]

It is polled, not watched by inotify: a ConfigMap is a chain of symbolic links, and network file systems tell
nobody of changes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from kvcore.config import read_file
from kvcore.errors import ConfigError
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.instance_spec import InstanceSpec

logger = logging.getLogger(__name__)


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    engines: list[EngineEntry]


def read_engines(path: Path) -> list[InstanceSpec]:
    """ConfigError says what is wrong with the file."""
    try:
        return checked(msgspec.convert(read_file(path), _Content).engines)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


class FileDiscovery:
    def __init__(self, config: DiscoveryConfig) -> None:
        self._path = Path(config.file)
        self._interval_s = config.interval_ms / 1e3

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        seen: tuple[int, ...] | None = None
        has_yielded = False
        while True:
            stamp = await asyncio.to_thread(_stamp, self._path)
            if stamp != seen or not has_yielded:
                seen = stamp
                try:
                    specs = await asyncio.to_thread(read_engines, self._path)
                except ConfigError as error:
                    logger.error("the list of engines cannot be used; the last good one stays: %s", error)
                    if not has_yielded:
                        yield ()
                else:
                    yield specs
                has_yielded = True
            await asyncio.sleep(self._interval_s)


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs when the file was changed or replaced; () when it is not there."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
