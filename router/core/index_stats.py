"""What the prefix index counts."""

from __future__ import annotations

import msgspec


class IndexStats(msgspec.Struct):
    """Counters since the start. Blocks, except where the name says otherwise."""

    events: int = 0
    stored: int = 0
    removed: int = 0
    unknown_parent: int = 0
    unknown_hash: int = 0
    other_block_size: int = 0
    other_group_events: int = 0
    bad_events: int = 0
    workers_cleared: int = 0
