"""`--record FILE`: what the core is told and decides, as JSON lines that mooncake-sim reads."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import msgspec

from kvcore.errors import ConfigError
from router.core.record import Line


class Recorder:
    """Written through Python's buffer, so a killed router may lose the last lines. ConfigError when the file
    cannot be opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path}: cannot be written: {error.strerror}") from error
        self._encode = msgspec.json.Encoder().encode

    def write(self, line: Line) -> None:
        self._file.write(self._encode(line) + b"\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
