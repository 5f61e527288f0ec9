"""Did the decode engine have the first layer of a block before the prefill engine committed its last one?

Both engines write when that happened to their trace files (`trace_path` of the connector), on the clock that
all processes of a host share.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Overlap(NamedTuple):
    """Over the block runs that one engine saved while the other loaded them. `lead_ms` is the longest time
    from 'layer 0 is in the decode engine' to 'last layer is in the store'; negative: they never overlapped.
    `layers_read_before_seal` is the store's own count of layers it served of unfinished blocks."""

    num_followed: int
    num_overlapping: int
    lead_ms: float | None
    layers_read_before_seal: int

    def sentence(self) -> str:
        if not self.num_overlapping or self.lead_ms is None:
            return "Layer overlap: none seen."
        return (
            f"Layer overlap: the decode engine had layer 0 of a block up to {self.lead_ms:,.0f} ms before "
            f"the prefill engine committed its last layer ({self.num_overlapping} of {self.num_followed} "
            f"transfers; the store served {self.layers_read_before_seal:,} layers of unfinished blocks)."
        )


def measure(saved: Path, loaded: Path, layers_read_before_seal: int) -> Overlap:
    """`saved`, `loaded`: trace files of the engine that computed and of the one that followed."""
    last_commit: dict[str, tuple[int, int]] = {}  # block -> (highest layer, when it was committed)
    for event in _events(saved, "save_layer_committed"):
        entry = (event["layer"], event["ns"])
        last_commit[event["block"]] = max(entry, last_commit.get(event["block"], entry))
    leads_ns = [
        last_commit[event["block"]][1] - event["ns"]
        for event in _events(loaded, "load_layer_done")
        if event["layer"] == 0 and event["block"] in last_commit
    ]
    return Overlap(
        num_followed=len(leads_ns),
        num_overlapping=sum(lead > 0 for lead in leads_ns),
        lead_ms=round(max(leads_ns) / 1e6, 3) if leads_ns else None,
        layers_read_before_seal=layers_read_before_seal,
    )


def _events(trace: Path, wanted: str) -> Iterator[dict[str, Any]]:
    for line in trace.read_text().splitlines() if trace.exists() else ():
        event = json.loads(line)
        if event["event"] == wanted:
            yield event
