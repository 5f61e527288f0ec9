"""Everything is admitted; engines queue."""

from router.core.decision import Choice, Rejection
from router.core.view import ClusterView, RequestView


class AdmitAll:
    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return None

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return None
