"""The SSD tier: objects that leave DRAM go to append-only segment files and come back from there.

`SsdTier` is the whole interface; the store's loop drives it and never blocks on a disk:

    tier.write(...) / tier.read(...) / tier.remove(...)      queue work, return at once
    notify()                                                 called by a disk thread when results wait
    tier.poll() -> outcomes                                  the loop picks the results up

One room a file: format (what lies on disk), aligned (memory for O_DIRECT), disk_io (system calls), segments
(files and their byte cap), batch (building one write), writer (the thread that appends), recovery (the index
after a restart), disk (one path), index (where every key lies), tier (all paths together).
"""

from store_server.ssd.config import DiskConfig, SsdConfig
from store_server.ssd.tier import SsdTier
from store_server.ssd.types import Dropped, Loaded, ReadRequest, Removed, WriteRequest, Written

__all__ = [
    "DiskConfig",
    "Dropped",
    "Loaded",
    "ReadRequest",
    "Removed",
    "SsdConfig",
    "SsdTier",
    "WriteRequest",
    "Written",
]
