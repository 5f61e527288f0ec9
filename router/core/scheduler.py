"""From a request and a view to a decision: router and simulator both call this and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from router.core.admission import make_admission
from router.core.admission.base import limit_ms
from router.core.algorithm1 import select_decode, select_prefill
from router.core.decision import Choice, Decision, Rejection, RejectReason
from router.core.policies.base import Policy
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

_NOTHING = Choice(None, "not_asked")
_DEFAULTS = Settings()


class Scheduler:
    """`prefill_policy` chooses in the mixed or the prefill pool, `decode_policy` in the decode pool.

    With both of them global_cache_aware / least_tbt and admission "early" this is Algorithm 1 line by line.
    """

    def __init__(self, prefill_policy: Policy, decode_policy: Policy, settings: Settings = _DEFAULTS) -> None:
        self._prefill_policy = prefill_policy
        self._decode_policy = decode_policy
        self._admission = make_admission(settings)
        self._settings = settings

    def schedule(self, request: RequestView, view: ClusterView, now: float) -> Decision:
        """Never raises for what the cluster is like: nobody to answer is a rejection (NO_INSTANCE).

        Without any prefill instance a decode instance does both, as an engine always can.
        """
        prefill = decode = _NOTHING
        if view.mixed:
            prefill = self._from_pool(request, view.mixed, view, now)
            if prefill.instance is not None:
                decode = self._predict_decode(request, Choice(prefill.instance, "same_instance"))
        else:
            prefill = self.choose_prefill(request, view, now)
            if any(prefill.instance is instance for instance in view.decode):
                decode = self._predict_decode(request, Choice(prefill.instance, "same_instance"))
            else:
                decode = self.choose_decode(request, view, now)
            if prefill.instance is None and decode.instance is not None:
                prefill = self._predict_prefill(
                    request, Choice(decode.instance, "no_prefill_instance"), view, now
                )
        if prefill.instance is None or decode.instance is None:
            tried = bool(view.decode or view.mixed)
            detail = "every instance was tried" if tried else "no mixed or decode instance is available"
            reject = Rejection(RejectReason.NO_INSTANCE, detail=detail)
            return Decision(reject=reject, prefill_choice=prefill, decode_choice=decode)
        is_split = prefill.instance is not decode.instance
        reject_reason = self._admission.at_arrival(request, prefill, decode, view, now)
        return Decision(
            prefill.instance if is_split else None,
            decode.instance,
            prefill.transfer if reject_reason is None else None,
            reject_reason,
            prefill.predicted_ms,
            decode.predicted_ms,
            prefill,
            decode,
            0.0 if reject_reason is None else self._hold_ms(request),
        )

    def choose_prefill(self, request: RequestView, view: ClusterView, now: float) -> Choice:
        """A prefill instance; also for a retry, when the decode stays where it is."""
        return self._from_pool(request, view.prefill, view, now)

    def choose_decode(self, request: RequestView, view: ClusterView, now: float) -> Choice:
        """A decode instance; also for a retry, when the prefill stays where it is."""
        pool = _allowed(view.decode or view.mixed, request)
        choice = self._decode_policy.choose(request, pool, view, now)
        return self._predict_decode(request, choice)

    def decide_decode(self, request: RequestView, view: ClusterView, now: float) -> Decision:
        """About the answering pool alone: nobody prefills for this request, or somebody has."""
        decode = self.choose_decode(request, view, now)
        reject = None
        if decode.instance is None:
            reject = Rejection(RejectReason.NO_INSTANCE, detail="no engine that could answer is left")
        return Decision(None, decode.instance, None, reject, 0.0, decode.predicted_ms, None, decode)

    def after_prefill(
        self, request: RequestView, decode: InstanceState, view: ClusterView, now: float
    ) -> Rejection | None:
        """Whether `decode` (as it is now) may still begin to decode this request, which must not be among
        those that decode there. Others that wait for their prefill may be refused themselves: they do not
        count."""
        present = msgspec.structs.replace(
            decode,
            running_requests=decode.decoding_requests,
            kv_used_tokens=math.ceil(decode.decoding_kv_tokens),
        )
        choice = self._predict_decode(request, Choice(present, "chosen_at_arrival"))
        return self._admission.after_prefill(request, choice, view, now)

    def _hold_ms(self, request: RequestView) -> float:
        """0 when it would be too late for its TTFT SLO."""
        hold_ms = self._settings.hold_ms
        limit = limit_ms(request.ttft_slo_ms, self._settings.ttft_slo_ms, request, self._settings)
        return hold_ms if request.waited_ms + hold_ms < limit else 0.0

    def _from_pool(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        choice = self._prefill_policy.choose(request, _allowed(pool, request), view, now)
        return self._predict_prefill(request, choice, view, now)

    def _predict_prefill(self, request: RequestView, choice: Choice, view: ClusterView, now: float) -> Choice:
        """Policies that look at loads only say nothing of TTFT, but admission and bookkeeping need it."""
        if choice.instance is None or choice.predicted_ms or self._is_blind(request):
            return choice
        match = view.prefix.match(request.block_hashes, now) if view.prefix is not None else None
        predicted = select_prefill(
            request,
            (choice.instance,),
            match,
            view,
            now,
            self._settings.prefill_model,
            self._settings.transfer_model,
            math.inf,
        )
        return Choice(
            choice.instance,
            choice.reason,
            choice.cost,
            choice.candidates,
            predicted.predicted_ms,
            predicted.prefix_blocks,
            predicted.compute_ms,
            choice.short_of_kv_tokens,
            choice.transfer,
        )

    def _predict_decode(self, request: RequestView, choice: Choice) -> Choice:
        if choice.instance is None or choice.predicted_ms or self._is_blind(request):
            return choice
        predicted = select_decode(
            request, (choice.instance,), self._settings.decode_model, self._settings.expected_output_tokens
        )
        return Choice(
            choice.instance,
            choice.reason,
            choice.cost,
            choice.candidates,
            predicted.predicted_ms,
            choice.prefix_blocks,
            choice.compute_ms,
            predicted.short_of_kv_tokens,
            choice.transfer,
        )

    def _is_blind(self, request: RequestView) -> bool:
        """Of a prompt of unknown length nothing can be predicted, and nobody asks: 8 us less a request."""
        return not request.prompt_tokens and self._settings.admission == "none"


def _allowed(pool: Sequence[InstanceState], request: RequestView) -> Sequence[InstanceState]:
    if request.dp_rank is not None:
        rank = f"@{request.dp_rank}"
        pool = tuple(instance for instance in pool if instance.instance_id.endswith(rank))
    if not request.excluded:
        return pool
    return tuple(instance for instance in pool if instance.instance_id not in request.excluded)
