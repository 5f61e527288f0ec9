"""With which weights a request is computed, besides those of the checkpoint that the namespace names.

vLLM's block hashes have an adapter's name and path in them (0.28 - 0.32), not what lies there: another
engine, or the next one after a restart, may have other weights by that name.
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcore.weights import model_directory, weights_identity
from mooncake_connector.log import get_logger

logger = get_logger(__name__)

_Files = tuple[tuple[str, int, int], ...]


class Variants:
    """Of the scheduler's thread alone."""

    def __init__(self, identify: Callable[[str], str | None] = weights_identity) -> None:
        self._identify = identify
        self._adapters: dict[tuple[int, str], tuple[str | None, _Files]] = {}
        self._reset = b""

    @property
    def is_private(self) -> bool:
        """Since `make_private` no other engine names its blocks as this one does."""
        return bool(self._reset)

    def make_private(self) -> None:
        """The engine's weights may be others from now on, and nobody says which."""
        self._reset = secrets.token_bytes(16)

    def of(self, lora_request: Any) -> bytes | None:
        """What the request's blocks are named by, besides their hashes; None when nobody can know what they
        are computed with. `lora_request`: vLLM's LoRARequest, or None. Looks at the adapter's directory, so
        it is to be asked once a request."""
        if lora_request is None:
            return self._reset
        identity = self._adapter(int(lora_request.lora_int_id), str(lora_request.lora_path))
        return None if identity is None else self._reset + identity.encode()

    def _adapter(self, lora_id: int, path: str) -> str | None:
        """Looked at when the first request names it, which is about when the engine loads it. An engine may
        load it again, unseen, so files that change later make an adapter that nobody knows."""
        known = self._adapters.get((lora_id, path))
        if known is not None and known[0] is None:
            return None
        try:
            directory = model_directory(path)
        except OSError:
            directory = None
        files = _files(directory)
        if known is None:
            known = self._adapters[lora_id, path] = self._identified(path, directory), files
            if known[0] is None:
                logger.warning("the weights of adapter %s cannot be identified: its KV is not shared", path)
        elif known[1] != files:
            known = self._adapters[lora_id, path] = None, files
            logger.warning("the files of adapter %s have changed: its KV is shared no more", path)
        return known[0]

    def _identified(self, path: str, directory: Path | None) -> str | None:
        try:
            return None if directory is None else self._identify(str(directory))
        except (OSError, ValueError) as error:
            logger.warning("adapter %s cannot be read: %s", path, error)
            return None


def _files(directory: Path | None) -> _Files:
    """Names, sizes and times of what lies there; () when it cannot be looked at."""
    try:
        stats = {} if directory is None else {file.name: file.stat() for file in sorted(directory.iterdir())}
    except OSError:
        return ()
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
