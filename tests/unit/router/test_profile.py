"""The profile recovers the model of an engine from what it measures."""

import asyncio
import random

import msgspec
import pytest

from kvcore.errors import ConfigError
from router.config import RouterConfig
from router.core.estimator import DecodeModel, PrefillModel
from router.core.fitting import fit_decode, fit_prefill
from router.profile import Plan, _tbt_ms, as_toml, measure

PREFILL = PrefillModel(3.0, 0.05, 1e-6)
DECODE = DecodeModel(8.0, 0.5, 0.001)
PLAN = Plan((128, 512, 1024), (1, 4, 16), (64, 256), 8, 2, 16)


class PerfectEngine:
    """Answers with the times its models say, and caches whole blocks of every prompt."""

    def __init__(self, decode_tokens: int) -> None:
        self.cached: set[tuple[int, ...]] = set()
        self.decode_tokens = decode_tokens
        self.running = 0

    async def generate(self, prompt: list[int], max_tokens: int) -> list[float]:
        blocks = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        prefix = max((len(block) for block in blocks if block in self.cached), default=0)
        self.cached.update(blocks)
        first = PREFILL.compute_ms(len(prompt), prefix)
        self.running += 1
        await asyncio.sleep(0)
        batch = self.running
        await asyncio.sleep(0)
        self.running -= 1
        tbt = DECODE.tbt_ms(batch, batch * (len(prompt) + self.decode_tokens // 2))
        return [first + tbt * number for number in range(max_tokens)]


def test_models_come_back() -> None:
    engine = PerfectEngine(PLAN.decode_tokens)
    prefills, decodes = asyncio.run(measure(PLAN, engine.generate, random.Random(1), 1000))
    assert {sample.prefix_tokens for sample in prefills if sample.prompt_tokens == 1024} == {0, 512, 912}
    prefill, decode = fit_prefill(prefills), fit_decode(decodes)
    for found, real in ((prefill, PREFILL), (decode, DECODE)):
        for name, value in msgspec.structs.asdict(real).items():
            assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_what_it_prints_is_configuration() -> None:
    loaded = msgspec.toml.decode(as_toml(PREFILL, DECODE), type=RouterConfig)
    assert loaded.scheduling.prefill_model == PREFILL and loaded.scheduling.decode_model == DECODE


def test_a_batch_that_never_decodes_together_is_an_error() -> None:
    times = iter([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0], [50.0, 51.0]])

    async def generate(prompt: list[int], max_tokens: int) -> list[float]:
        if max_tokens == 1 or len(prompt) == 32:
            return [1.0, 2.0]
        return [next(times)[0]]

    plan = Plan((32,), (2,), (64,), 2, 1, 16)
    with pytest.raises(ConfigError, match="--decode-tokens"):
        asyncio.run(measure(plan, generate, random.Random(1), 1000))


def test_tokens_that_arrive_in_lumps_are_spread_over_their_time() -> None:
    assert _tbt_ms([[10.0, 10.0, 10.0, 40.0, 40.0, 70.0]]) == pytest.approx(12.0)
    assert _tbt_ms([[0.0, 5.0, 10.0, 20.0, 30.0], [10.0, 20.0, 30.0]]) == pytest.approx(10.0)
    with pytest.raises(ConfigError, match="--decode-tokens"):
        _tbt_ms([[10.0, 10.0, 10.0]])
