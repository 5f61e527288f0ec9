"""Each side looks at its own load when the request gets there: TTFT at arrival, TBT after the prefill.

The paper's baseline. Under overload it prefills requests that decoding then refuses.
"""

from router.core.admission.base import check_decode_now, check_ttft
from router.core.decision import Choice, Rejection
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView


class Baseline:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return check_ttft(request, prefill, self._settings)

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return check_decode_now(request, decode, view, self._settings)
