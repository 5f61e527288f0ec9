"""Predictive admission with each request's own output length, predicted from history.

The paper leaves request-level prediction open (section 7.4: an output length predictor is costly and
inaccurate). Histories by tenant and prompt length cost nothing and see what a uniform t_d cannot: that the
requests running now will all end soon, or will not.
"""

from router.core.admission.predictive import Predictive
from router.core.view import DecodeForecast


class PredictiveRequest(Predictive):
    def _load_at(self, forecast: DecodeForecast, at: float, now: float) -> tuple[float, float]:
        return forecast.expected_load_at(at, now)
