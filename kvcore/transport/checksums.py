"""xxh3-64 over the bytes of a layer, wherever they lie. 0 stands for "not given"."""

from collections.abc import Sequence

import xxhash

from kvcore.layout import split_views


def checksum(views: Sequence[memoryview]) -> int:
    """Of the concatenation of `views`."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    state = xxhash.xxh3_64()
    for view in views:
        state.update(view)
    return state.intdigest()


def layer_checksums(views: Sequence[memoryview], num_layers: int) -> list[int]:
    """One for each of `num_layers` equal layers that lie one behind the other in `views`."""
    if num_layers == 1:
        return [checksum(views)]
    share_bytes = sum(map(len, views)) // num_layers
    return [checksum(run) for run in split_views(views, [share_bytes] * num_layers)]


def is_corrupt(views: Sequence[memoryview], expected: Sequence[int]) -> bool:
    """Whether one of the layers in `views` differs from what its writer computed."""
    if len(expected) == 1:
        return expected[0] != 0 and expected[0] != checksum(views)
    if not any(expected):
        return False
    found = layer_checksums(views, len(expected))
    return any(given and given != computed for given, computed in zip(expected, found, strict=True))
