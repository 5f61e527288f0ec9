"""Which weights a process serves: those it was started with, until they are replaced while it runs. Pure."""

from typing import NamedTuple


class Weights(NamedTuple):
    """`version` counts the changes. `model_path` and `load_format`: where they were loaded from since the
    start, None for those that the engine was started with. `is_known` False: they have no name, or the
    engine's own caches still hold KV of earlier ones."""

    version: int = 0
    model_path: str | None = None
    load_format: str | None = None
    is_known: bool = True


class ServedWeights:
    """Told by the scheduler's thread, asked by any."""

    def __init__(self) -> None:
        self.now = Weights()
        self.is_watched = False
        self._unflushed: tuple[str, str | None] | None = None

    def replacing(self) -> None:
        """From here on nobody knows what they are."""
        self._unflushed = None
        self.now = Weights(self.now.version + 1, is_known=False)

    def loaded(self, model_path: str, load_format: str | None) -> None:
        """All of them, from these files."""
        self._unflushed = (model_path, load_format)

    def flushed(self) -> None:
        """The engine's own caches are empty."""
        if self._unflushed is not None:
            self.now = Weights(self.now.version + 1, *self._unflushed)
            self._unflushed = None


SERVED = ServedWeights()
