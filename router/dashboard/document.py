"""What the page shows, as one JSON document: made when somebody looks, from what the router knows anyway."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from kvcore import __version__
from router import decisions
from router.core.decision import Candidate
from router.dashboard.history import SAMPLE_INTERVAL_S
from router.dashboard.verdict import EngineState, verdict

if TYPE_CHECKING:
    from router.app import Router

SHOWN_DECISIONS = 15
SHOWN_CANDIDATES = 8
SHOWN_PREFIXES = 12


def document(router: Router, after_row: int) -> dict[str, Any]:
    """`after_row`: the last row of the history that the page has; it gets those behind it."""
    now = asyncio.get_running_loop().time()
    watch, config = router.watch, router.config
    engines = _engines(router, now)
    recent = watch.history.recent()
    states = [
        EngineState(instance_id, router.cluster.instances[instance_id].role, e["state"], e["detail"])
        for instance_id, e in engines.items()
    ]
    snapshot = watch.snapshot(now)
    return {
        "unix_time_s": snapshot.unix_time_s,
        "started_unix_s": watch.started_unix_s,
        "sample_interval_s": SAMPLE_INTERVAL_S,
        "version": __version__,
        "policies": list(dict.fromkeys(config.policies)),
        "admission": config.scheduling.admission,
        "reads_prompts": config.reads_prompts,
        "asks_loads": config.asks_loads,
        "slo": {"ttft_ms": config.scheduling.ttft_slo_ms, "tbt_ms": config.scheduling.tbt_slo_ms},
        "verdict": verdict(states, recent, draining=router.draining),
        "active_requests": snapshot.active_requests,
        "queue_ms": snapshot.queue_ms,
        "recent": recent,
        "rejected_total": snapshot.rejected,
        "refused_total": {str(status): count for status, count in router.metrics.refusals.items()},
        "last_row": watch.history.num_rows,
        "history": watch.history.columns_after(after_row),
        "engines": list(engines.values()),
        "prefixes": _prefixes(router, now),
        "decisions": [_shortened(one) for one in router.decisions.newest_first(SHOWN_DECISIONS)],
    }


def _engines(router: Router, now: float) -> dict[str, dict[str, Any]]:
    states = router.cluster.book.look(now)
    found = {}
    for instance_id, instance in router.cluster.instances.items():
        state, since = router.watch.state_since(instance_id)
        load = states[instance_id]
        found[instance_id] = {
            "id": instance_id,
            "role": instance.role.value,
            "state": state,
            "since_unix_s": since,
            "detail": instance.health_detail,
            "in_flight": instance.in_flight,
            "foreign": load.foreign_requests,
            "decoding": load.running_requests,
            "queue_ms": load.queue_ms(now),
            "kv_used_tokens": load.kv_used_tokens,
            "kv_capacity_tokens": load.kv_capacity_tokens,
            "prefill_scale": load.prefill_scale,
            "tbt_scale": load.tbt_scale,
        }
    return found


def _prefixes(router: Router, now: float) -> list[dict[str, Any]]:
    index = router.index
    if index is None:
        return []
    return [
        {
            "id": f"{prefix.block_hash & 0xFFFFFFFFFFFFFFFF:016x}",
            "tokens": prefix.num_blocks * index.block_size_tokens,
            "requests_per_min": prefix.requests_per_min,
            "hit_share": prefix.hit_share,
            "held_by": index.workers_holding(prefix.block_hash),
        }
        for prefix in router.watch.heat.hottest(SHOWN_PREFIXES, now)
    ]


def _shortened(noted: decisions.Noted) -> dict[str, Any]:
    """A decision with its best candidates only: a cluster may have hundreds."""
    decision = noted.decision
    explained = noted.explained()
    prefill = decision.prefill_choice.candidates if decision.prefill_choice is not None else ()
    decode = decision.decode_choice.candidates if decision.decode_choice is not None else ()
    explained["candidates"] = {"prefill": _best(prefill), "decode": _best(decode)}
    explained["num_candidates"] = len(prefill) + len(decode)
    return explained


def _best(candidates: tuple[Candidate, ...]) -> object:
    ranked = sorted(candidates, key=lambda candidate: candidate.cost)
    return msgspec.to_builtins(ranked[:SHOWN_CANDIDATES])
