"""What one figure of the paper is here: runs, our numbers beside the paper's, and what must hold of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvsim.config import SimConfig, TraceSpec
from kvsim.runs import Result

Many = Callable[[Sequence[SimConfig]], list[Result]]


class Row(msgspec.Struct, frozen=True):
    """`paper` is "" where the paper gives no number."""

    what: str
    paper: str
    ours: str


class Claim(msgspec.Struct, frozen=True):
    text: str
    holds: bool


class Figure(msgspec.Struct, frozen=True):
    """`words`: where ours differ from the paper's, and why. `plots` by file stem."""

    name: str
    title: str
    rows: Sequence[Row]
    claims: Sequence[Claim]
    words: str
    plots: dict[str, bytes] = {}


class Traces(msgspec.Struct, frozen=True):
    """Paths of the two public traces; `end_s` cuts them for a quick look (0: whole)."""

    conversation: str
    synthetic: str
    end_s: float = 0.0

    def spec(self, name: str, speed: float = 1.0) -> TraceSpec:
        path = self.conversation if name == "conversation" else self.synthetic
        return TraceSpec(path=path, speed=speed, end_s=self.end_s)


def seconds(ms: float) -> str:
    return f"{ms / 1e3:.2f} s"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
