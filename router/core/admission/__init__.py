"""Admission policies by the name a user gives (`--admission`)."""

from collections.abc import Callable

from kvcore.errors import ConfigError
from router.core.admission.base import Admission
from router.core.admission.baseline import Baseline
from router.core.admission.early import Early
from router.core.admission.none import AdmitAll
from router.core.admission.predictive import Predictive
from router.core.admission.predictive_request import PredictiveRequest
from router.core.admission.priced import Priced
from router.core.settings import Settings

ADMISSIONS: dict[str, Callable[[Settings], Admission]] = {
    "none": lambda settings: AdmitAll(),
    "baseline": Baseline,
    "early": Early,
    "predictive": Predictive,
    "predictive_request": PredictiveRequest,
    "priced": Priced,
}


def make_admission(settings: Settings) -> Admission:
    """ConfigError, naming the known ones, when there is no such admission policy."""
    if settings.admission not in ADMISSIONS:
        raise ConfigError(
            f"no admission policy {settings.admission!r}; there are: {', '.join(sorted(ADMISSIONS))}"
        )
    return ADMISSIONS[settings.admission](settings)
