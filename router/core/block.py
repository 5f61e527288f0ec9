"""One block of the prefix index. Apart, because it must stay as small as a msgspec.Struct is."""

from __future__ import annotations

import msgspec


class Block(msgspec.Struct, gc=False, eq=False):
    """`engine_hashes` are the names engines have for it: mostly one, so no tuple is made for one.

    `hot` marks an inner block that a lookup ended at: it gets a second chance when it becomes a leaf.
    The parent is named by hash, not by reference: freeing a long chain must not recurse.
    """

    own_hash: int
    engine_hashes: int | tuple[int, ...]
    parent: int | None
    holders: int
    num_children: int
    hot: bool
