"""What a client process can do with the system under test; one implementation per system."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Driver(Protocol):
    """A connected client. Values move between `source` / `sink`, which `allocate` made, and the store.

    All systems do the same work: a put returns when the value can be read by others, a get when the bytes
    stand in the caller's buffer. Keys come in the form `make_key` gives them, prepared outside the timing.
    """

    def allocate(self, size_bytes: int) -> Bytes:
        """Touched memory, registered with the system if it wants that. Called twice: source, then sink."""
        ...

    def make_key(self, digest: bytes) -> Any:
        """The system's native form of a 32-byte key."""
        ...

    def put(self, key: Any, offset: int, size_bytes: int) -> bool: ...
    def get(self, key: Any, offset: int, size_bytes: int) -> bool: ...
    def batch_put(self, keys: Sequence[Any], offsets: Sequence[int], size_bytes: int) -> bool: ...
    def batch_get(self, keys: Sequence[Any], offsets: Sequence[int], size_bytes: int) -> bool: ...

    def exists(self, keys: Sequence[Any]) -> bool:
        """True when the system said of every single key that it is there."""
        ...

    def clear(self) -> None:
        """Forget every value of every client."""
        ...

    def close(self) -> None: ...


def touched(size_bytes: int) -> Bytes:
    """Ordinary memory whose pages exist, so that no page fault is measured later."""
    return np.ones(size_bytes, np.uint8)
