"""The cheapest cluster that keeps the SLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvsim.config import SimConfig
from kvsim.runs import Result


class Plan(msgspec.Struct, frozen=True):
    """`best` None: not even `max_nodes` are enough. `tried`: everything simulated, smallest first."""

    best: Result | None
    tried: Sequence[Result]


def splits(config: SimConfig, num_nodes: int) -> list[SimConfig]:
    """All ways to divide `num_nodes` into prefill and decode nodes."""
    cluster = config.cluster
    if cluster.kind == "coupled":
        sized = msgspec.structs.replace(cluster, mixed_nodes=num_nodes)
        return [msgspec.structs.replace(config, cluster=sized)]
    group = cluster.prefill_group_nodes
    return [
        msgspec.structs.replace(
            config,
            cluster=msgspec.structs.replace(cluster, prefill_nodes=prefill, decode_nodes=num_nodes - prefill),
        )
        for prefill in range(group, num_nodes, group)
    ]


def smallest_cluster(
    config: SimConfig,
    wanted_share: float,
    max_nodes: int,
    simulate_many: Callable[[Sequence[SimConfig]], list[Result]],
) -> Plan:
    """By bisection over the number of nodes: more nodes never serve less when they are divided well. Of one
    size, the division with the largest share of good requests.
    """
    smallest = 1 if config.cluster.kind == "coupled" else config.cluster.prefill_group_nodes + 1
    tried: list[Result] = []
    best: Result | None = None
    low, high = smallest, max_nodes
    while low <= high:
        num_nodes = (low + high) // 2
        results = _near_balance(config, num_nodes, simulate_many)
        tried.extend(results)
        winner = max(results, key=lambda result: result.summary.good_share)
        if winner.summary.good_share >= wanted_share:
            best, high = winner, num_nodes - 1
        else:
            low = num_nodes + 1
    return Plan(best, sorted(tried, key=lambda r: (r.summary.num_nodes, r.config.cluster.prefill_nodes)))


def _near_balance(
    config: SimConfig, num_nodes: int, simulate_many: Callable[[Sequence[SimConfig]], list[Result]]
) -> list[Result]:
    """The share of good requests rises and falls once over the divisions, so that a search among thirds ends
    at its peak."""
    choices = splits(config, num_nodes)
    known: dict[int, Result] = {}

    def ask(positions: Sequence[int]) -> None:
        fresh = [p for p in dict.fromkeys(positions) if p not in known]
        if fresh:
            known.update(zip(fresh, simulate_many([choices[p] for p in fresh]), strict=True))

    low, high = 0, len(choices) - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        ask([left, right])
        if known[left].summary.good_share < known[right].summary.good_share:
            low = left + 1
        else:
            high = right - 1 if known[left].summary.good_share > known[right].summary.good_share else right
    ask(range(low, high + 1))
    return list(known.values())
