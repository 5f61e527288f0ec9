"""Optional trace of layers: one JSON line each, so that the overlap of two engines can be shown.

{"event": "save_layer_committed" | "load_layer_done", "request": ..., "layer": l, "block": key, "ns": ...}

`block` is the key of the first block of the run that moved, `ns` CLOCK_MONOTONIC, which all processes of one
host share.
"""

import json
import threading
import time
from pathlib import Path
from typing import TextIO


class LayerTrace:
    """Thread-safe. With an empty path it does nothing."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._lock = threading.Lock()

    def record(self, event: str, request_id: str, layers: range, first_key: bytes) -> None:
        if not self._path:
            return
        now_ns = time.monotonic_ns()
        lines = [
            json.dumps(
                {
                    "event": event,
                    "request": request_id,
                    "layer": layer,
                    "block": first_key.hex(),
                    "ns": now_ns,
                }
            )
            for layer in layers
        ]
        with self._lock:
            if self._file is None:
                # Line buffering in append mode: several ranks may share one file without tearing lines.
                self._file = Path(self._path).open("a", buffering=1)  # noqa: SIM115
            self._file.write("".join(line + "\n" for line in lines))

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
