"""`--record FILE`: what the core is told and decides, as JSON lines that mooncake-sim reads."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

import msgspec

from kvcore.errors import ConfigError
from router.core.record import Line

logger = logging.getLogger(__name__)


class Recorder:
    """Written through Python's buffer, so a killed router may lose the last lines. ConfigError when the file
    cannot be opened. A disk that is full ends the record, not the requests."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: cannot be written: {error.strerror}") from error
        self._path = path
        self._has_failed = False
        self._encode = msgspec.json.Encoder().encode

    def write(self, line: Line) -> None:
        if self._has_failed:
            return
        try:
            self._file.write(self._encode(line) + b"\n")
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error("--record %s: %s; nothing more is recorded", self._path, error.strerror)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._file.close()
        except OSError as failure:
            self._failed(failure)
