"""How the cluster is, in sentences: the first thing somebody reads who was woken up. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from router.core.view import Role
from router.dashboard.history import Figures

# What a service level is usually promised for.
_ENOUGH_MET = 0.95
_NOTABLE_FAILURES = 0.01

GOOD, WATCH, BAD = "good", "watch", "bad"

# Beyond so many in the same trouble they are counted, not listed.
_NAMED_ENGINES = 3
# level, state, what is said of one engine, and of many
_TROUBLES = (
    (BAD, "down", "is down", "are down"),
    (
        BAD,
        "breaker_open",
        "keeps failing and gets no requests for now",
        "keep failing and get no requests for now",
    ),
    (WATCH, "unknown", "has not been healthy yet", "have not been healthy yet"),
)


class EngineState(msgspec.Struct, frozen=True):
    """`state`: up, down, unknown or breaker_open."""

    instance_id: str
    role: Role
    state: str
    detail: str = ""


class Slo(msgspec.Struct, frozen=True):
    """The router's own, ms; 0: none."""

    ttft_ms: float = 0.0
    tbt_ms: float = 0.0


class Finding(msgspec.Struct, frozen=True):
    """`level`: good, watch or bad."""

    level: str
    text: str


def verdict(engines: Sequence[EngineState], recent: Figures | None, *, draining: bool) -> list[Finding]:
    """The worst first; never empty."""
    found = [*_of_engines(engines)]
    if draining:
        found.append(Finding(BAD, "This router is draining: it takes no new connections."))
    if recent is not None:
        found += _of_traffic(recent)
    if not found:
        found.append(Finding(GOOD, _all_well(engines, recent)))
    return sorted(found, key=lambda finding: (BAD, WATCH, GOOD).index(finding.level))


def _of_engines(engines: Sequence[EngineState]) -> list[Finding]:
    if not engines:
        return [Finding(BAD, "There are no engines: every request is refused.")]
    found = []
    answering = [engine for engine in engines if engine.role is not Role.PREFILL]
    if not any(engine.state in ("up", "unknown") for engine in answering):
        found.append(Finding(BAD, "No engine can answer: every request is refused."))
    for level, state, one, many in _TROUBLES:
        concerned = [engine for engine in engines if engine.state == state]
        if len(concerned) > _NAMED_ENGINES:
            names = ", ".join(engine.instance_id for engine in concerned[:_NAMED_ENGINES])
            more = len(concerned) - _NAMED_ENGINES
            found.append(Finding(level, f"{len(concerned)} engines {many}: {names} and {more} more."))
            continue
        for engine in concerned:
            because = f" ({engine.detail})" if engine.detail and state != "breaker_open" else ""
            found.append(Finding(level, f"{engine.instance_id} {one}{because}."))
    return found


def _of_traffic(recent: Figures) -> list[Finding]:
    found = []
    for name, share in (("TTFT", recent.ttft_met_share), ("TBT", recent.tbt_met_share)):
        if share is not None and share < _ENOUGH_MET:
            found.append(
                Finding(WATCH, f"{share:.0%} of the answers of the last minute met their {name} SLO.")
            )
    if num_rejected := sum(recent.rejected.values()):
        were = "request was" if num_rejected == 1 else "requests were"
        found.append(Finding(WATCH, f"{num_rejected} {were} rejected in the last minute."))
    if recent.finished and (share := recent.failed / recent.finished) > _NOTABLE_FAILURES:
        found.append(Finding(BAD, f"{share:.0%} of the requests of the last minute failed."))
    return found


def _all_well(engines: Sequence[EngineState], recent: Figures | None) -> str:
    up = "The only engine is up." if len(engines) == 1 else f"All {len(engines)} engines are up."
    if recent is None or not recent.finished:
        return f"{up} No request ended in the last minute."
    return f"{up} Nothing was rejected and nothing failed in the last minute."
