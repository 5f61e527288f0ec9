"""From a request and a view to a decision: the router and the simulator both call this and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.decision import Choice, Decision, Rejection, RejectReason
from router.core.policies.base import Policy
from router.core.view import ClusterView, InstanceState, RequestView


class Scheduler:
    """`prefill_policy` chooses in the mixed or the prefill pool, `decode_policy` in the decode pool."""

    def __init__(self, prefill_policy: Policy, decode_policy: Policy) -> None:
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy

    def schedule(self, request: RequestView, view: ClusterView, now: float) -> Decision:
        """Never raises for what the cluster is like: an empty pool is a rejection (NO_INSTANCE)."""
        if view.mixed:
            choice = self._prefill_policy.choose(request, _allowed(view.mixed, request), view, now)
            if choice.instance is None:
                return _no_instance("mixed", choice)
            return Decision(
                decode=choice.instance,
                transfer=choice.transfer,
                ttft_ms=choice.predicted_ms,
                prefill_choice=choice,
            )
        prefill = self._prefill_policy.choose(request, _allowed(view.prefill, request), view, now)
        if prefill.instance is None:
            return _no_instance("prefill", prefill)
        decode = self._decode_policy.choose(request, _allowed(view.decode, request), view, now)
        if decode.instance is None:
            return _no_instance("decode", decode)
        return Decision(
            prefill=prefill.instance,
            decode=decode.instance,
            transfer=prefill.transfer,
            ttft_ms=prefill.predicted_ms,
            tbt_ms=decode.predicted_ms,
            prefill_choice=prefill,
            decode_choice=decode,
        )

    def choose_decode(self, request: RequestView, view: ClusterView, now: float) -> Choice:
        """Another decode instance for a request whose prefill stays where it is (a retry)."""
        return self._decode_policy.choose(request, _allowed(view.decode or view.mixed, request), view, now)

    def choose_prefill(self, request: RequestView, view: ClusterView, now: float) -> Choice:
        """Another prefill instance for a request whose decode is under way (a retry)."""
        return self._prefill_policy.choose(request, _allowed(view.prefill, request), view, now)


def _allowed(pool: Sequence[InstanceState], request: RequestView) -> Sequence[InstanceState]:
    if not request.excluded:
        return pool
    return tuple(instance for instance in pool if instance.instance_id not in request.excluded)


def _no_instance(pool: str, choice: Choice) -> Decision:
    return Decision(
        reject=Rejection(RejectReason.NO_INSTANCE, detail=f"no {pool} instance is available"),
        prefill_choice=choice,
    )
