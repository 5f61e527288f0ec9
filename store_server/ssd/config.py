"""Settings of the SSD tier."""

from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from store_server.ssd.format import PAGE_BYTES

DEFAULT_SEGMENT_BYTES = 256 << 20
# Reclaim drops whole segments, so a cap of few segments would throw away a large share of the data at once.
MIN_SEGMENTS = 2
WANTED_SEGMENTS = 16


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One path: a directory on a disk of its own. `capacity_bytes` caps what our files there take.

    `segment_bytes` 0 chooses: 256 MiB, or less so that the cap holds at least 16 segments.
    """

    path: Path
    capacity_bytes: int
    segment_bytes: int = 0

    def effective_segment_bytes(self) -> int:
        """Raises ConfigError when the cap is too small to be of use."""
        segment_bytes = self.segment_bytes or min(
            DEFAULT_SEGMENT_BYTES, self.capacity_bytes // WANTED_SEGMENTS
        )
        segment_bytes -= segment_bytes % PAGE_BYTES
        if segment_bytes < 4 * PAGE_BYTES or self.capacity_bytes < MIN_SEGMENTS * segment_bytes:
            raise ConfigError(
                f"the SSD capacity of {self.path} is {self.capacity_bytes} bytes, which does not hold "
                f"{MIN_SEGMENTS} segments; give it more, or a smaller segment_bytes"
            )
        return segment_bytes


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`queue_bytes`: written-back bytes that may wait for each disk; above it the put path has to wait.

    `batch_bytes`: aim of one write (4 MiB measured best with O_DIRECT on NVMe). `linger_ms`: how long the
    writer waits for a batch to fill when the queue runs low. `retry_s`: pause before a full disk is tried
    again.
    """

    disks: tuple[DiskConfig, ...]
    queue_bytes: int = 64 << 20
    batch_bytes: int = 4 << 20
    read_threads: int = 4
    linger_ms: float = 2.0
    retry_s: float = 5.0
