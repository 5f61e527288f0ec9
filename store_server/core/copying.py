"""In which pieces objects are copied from another store: batches of whole objects, each batch some layers at
a time, so that whoever reads behind the copy finds the first layers early."""

from collections.abc import Iterator, Sequence

import msgspec


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One object to be copied. `key` here, `source_key` at the source; `parent` as StoredObject has it."""

    key: bytes
    source_key: bytes
    parent: bytes = b""
    size_bytes: int = 0
    num_layers: int = 0


def batches(copies: Sequence[Copy], max_bytes: int) -> Iterator[list[Copy]]:
    """Runs of one shape, in the order given, of at most `max_bytes`; what is larger alone gets its own."""
    batch: list[Copy] = []
    for copy in copies:
        if batch and (
            (batch[0].size_bytes, batch[0].num_layers) != (copy.size_bytes, copy.num_layers)
            or (len(batch) + 1) * copy.size_bytes > max_bytes
        ):
            yield batch
            batch = []
        batch.append(copy)
    if batch:
        yield batch


def layer_steps(batch: Sequence[Copy], step_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of layers that cover the objects of `batch` (not empty, of one shape), each about `step_bytes`
    of all of them together and at least one layer."""
    num_layers = batch[0].num_layers
    bytes_per_layer = len(batch) * batch[0].size_bytes // num_layers
    step = min(max(step_bytes // max(bytes_per_layer, 1), 1), num_layers)
    for begin in range(0, num_layers, step):
        yield begin, min(begin + step, num_layers)
