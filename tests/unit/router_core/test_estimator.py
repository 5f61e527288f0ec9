import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvcore.wire.events import Medium
from router.core.correction import LIMIT, Correction
from router.core.estimator import DecodeModel, PrefillModel, TransferModel
from router.core.fitting import DecodeSample, PrefillSample, fit_decode, fit_prefill, relative_errors

lengths = st.integers(0, 200_000)


@given(lengths, lengths)
def test_prefill_is_the_polynomial_of_its_docstring(n: int, p: int) -> None:
    n, p = max(n, p), min(n, p)
    model = PrefillModel(3.0, 0.2, 1e-6)
    assert model.compute_ms(n, p) == pytest.approx(3.0 + 0.2 * (n - p) + 1e-6 * (n * n - p * p))


@given(lengths, lengths, lengths)
def test_computing_in_two_parts_costs_one_constant_more(a: int, b: int, c: int) -> None:
    p, middle, n = sorted((a, b, c))
    model = PrefillModel()
    parts = model.compute_ms(middle, p) + model.compute_ms(n, middle)
    assert parts == pytest.approx(model.compute_ms(n, p) + model.constant_ms)


def test_transfers() -> None:
    model = TransferModel(
        kv_bytes_per_token=1000,
        latency_ms=2,
        network_bytes_per_s=1e7,
        cpu_bytes_per_s=5e6,
        disk_bytes_per_s=1e6,
        external_bytes_per_s=5e5,
    )
    assert model.remote_ms(0, Medium.CPU) == 0
    assert model.remote_ms(1000, Medium.CPU) == 2 + 200
    assert model.remote_ms(1000, Medium.DISK) == 2 + 1000
    assert model.remote_ms(1000, Medium.CPU, transfers_under_way=3) == 2 + 400
    assert model.local_ms(1000, Medium.GPU) == 0
    assert model.local_ms(1000, Medium.CPU) == 200
    assert model.local_ms(1000, Medium.EXTERNAL) == 2000


def prefill_samples(model: PrefillModel, noise: float = 0.0) -> list[PrefillSample]:
    return [
        PrefillSample(n, p, model.compute_ms(n, p) * (1 + noise * (-1) ** i))
        for i, (n, p) in enumerate(
            (n, n * share // 4) for n in (64, 500, 2000, 8000, 32000) for share in range(4)
        )
    ]


@pytest.mark.parametrize(
    "model",
    [
        PrefillModel(),
        PrefillModel(5.0, 0.02, 1e-7),
        PrefillModel(0.0, 0.3, 0.0),
        PrefillModel(40.0, 0.0, 1e-5),
    ],
)
def test_fit_finds_the_model_that_made_the_samples(model: PrefillModel) -> None:
    fitted = fit_prefill(prefill_samples(model))
    for name in model.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(model, name), rel=1e-6, abs=1e-9)


def test_fit_is_no_worse_than_the_noise_at_any_length() -> None:
    samples = prefill_samples(PrefillModel(), noise=0.05)
    assert max(relative_errors(fit_prefill(samples), samples)) < 0.11


def test_fit_never_predicts_negative_durations() -> None:
    # A line through these has a negative constant.
    samples = [PrefillSample(n, 0, ms) for n, ms in ((100, 1.0), (1000, 20.0), (2000, 41.0), (4000, 85.0))]
    fitted = fit_prefill(samples)
    assert min(fitted.constant_ms, fitted.per_token_ms, fitted.per_token2_ms) >= 0


def test_fit_decode() -> None:
    model = DecodeModel(12.0, 0.05, 1e-4)
    samples = [DecodeSample(b, b * k, model.tbt_ms(b, b * k)) for b in (1, 8, 64) for k in (100, 4000)]
    fitted = fit_decode(samples)
    assert fitted.tbt_ms(32, 50_000) == pytest.approx(model.tbt_ms(32, 50_000), rel=1e-6)


@pytest.mark.parametrize(
    "samples, complaint",
    [
        ([], "measure at least three different prompt and prefix lengths"),
        ([PrefillSample(100, 0, 5.0)] * 10, "measure at least three different"),
        (
            [PrefillSample(100, 0, 5.0), PrefillSample(200, 0, -1.0), PrefillSample(400, 100, 2.0)],
            "positive number",
        ),
    ],
)
def test_samples_that_tell_nothing_are_refused(samples: list[PrefillSample], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        fit_prefill(samples)


@given(st.floats(0.2, 5.0))
def test_correction_converges_on_the_true_ratio(ratio: float) -> None:
    correction = Correction()
    for _ in range(200):
        correction.measured(10 * ratio, 10)
    assert correction.scale == pytest.approx(ratio, rel=1e-3)


def test_correction_bounds_outliers_and_ignores_nonsense() -> None:
    correction = Correction(weight=1.0)
    correction.measured(1e9, 1)
    assert correction.scale == pytest.approx(LIMIT)
    for measured, predicted in ((0, 1), (1, 0), (-1, 1), (float("nan"), 1)):
        correction.measured(measured, predicted)
    assert correction.scale == pytest.approx(LIMIT)


def test_twice_as_slow_and_twice_as_fast_weigh_the_same() -> None:
    one, other = Correction(weight=0.1), Correction(weight=0.1)
    one.measured(2, 1)
    other.measured(1, 2)
    assert one.scale * other.scale == pytest.approx(1.0)
