"""The contract of a policy: choose one instance of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from router.core.decision import Candidate, Choice
from router.core.view import ClusterView, InstanceState, RequestView

EMPTY_POOL = Choice(None, "empty_pool")


class Policy(Protocol):
    """A policy may keep state of its own (a turn, a PRNG), never a clock.

    It is called from one thread. `pool` is the part of the view to choose from, already without the request's
    excluded instances; an empty pool gives EMPTY_POOL. Equal candidates are taken in turn, so that an idle
    cluster does not send everything to its first instance (sglang#32983).
    """

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice: ...


def least_loaded(pool: Sequence[InstanceState], first: int, reason: str) -> Choice:
    """The least loaded of a pool that is not empty; of equals the first from position `first` on."""
    candidates = tuple(Candidate(instance.instance_id, instance.load) for instance in pool)
    size = len(pool)
    best = min(range(size), key=lambda i: (candidates[i].cost, (i - first) % size))
    return Choice(pool[best], reason, candidates[best].cost, candidates)
