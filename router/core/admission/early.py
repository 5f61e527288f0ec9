"""Early rejection: both sides are looked at when the request arrives (Algorithm 1, paper section 7.2).

No prefill is wasted, but the decode load seen is older than the one the request will meet, by the length of a
prefill: under overload the two pools then swing in antiphase (section 7.3).
"""

from router.core.admission.base import check_decode_now, check_ttft
from router.core.decision import Choice, Rejection
from router.core.settings import Settings
from router.core.view import ClusterView, RequestView


class Early:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def at_arrival(
        self, request: RequestView, prefill: Choice, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        rejection = check_ttft(request, prefill, self._settings)
        return rejection or check_decode_now(request, decode, view, self._settings)

    def after_prefill(
        self, request: RequestView, decode: Choice, view: ClusterView, now: float
    ) -> Rejection | None:
        return None
