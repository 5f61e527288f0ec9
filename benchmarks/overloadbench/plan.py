"""A cluster, what is offered to it by default, and how much of that it can take. Pure."""

import random
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from router.core.estimator import DecodeModel, PrefillModel

ADMISSIONS = ("baseline", "early", "predictive", "predictive_request")
VOCABULARY = 1000


class Models(msgspec.Struct, frozen=True):
    """Of an engine, as `mooncake-router profile` prints them."""

    prefill: PrefillModel = PrefillModel()
    decode: DecodeModel = DecodeModel()

    def faster(self, factor: float) -> "Models":
        """Of an engine that takes 1 / `factor` of the time for everything."""
        p, d = self.prefill, self.decode
        return Models(
            PrefillModel(p.constant_ms / factor, p.per_token_ms / factor, p.per_token2_ms / factor),
            DecodeModel(d.constant_ms / factor, d.per_request_ms / factor, d.per_kv_token_ms / factor),
        )


class Request(msgspec.Struct, frozen=True):
    at_s: float  # after the beginning
    prompt: Sequence[int]
    output_tokens: int


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster, and what is asked of it. Times are the engines'.

    `compress`: the clock of the machine that plays it runs so many times slower than that of the engines it
    plays. Engines, arrivals and SLOs are all as many times faster there, and what is measured is multiplied
    again, so that every ratio between them stays; only the router's own time, the network's and the
    machine's weigh so much more.

    `router_share`: the router is given this part of the SLOs, the rest is for what it does not predict (the
    first decode step, the network). What comes before `warm_up_s` is not counted. `block_size_tokens` of
    engines that remember every prompt; 0: they remember none. `event_tokens`: an engine streams so many
    tokens at a time (vLLM's --stream-interval). `decode_ms`, the uniform t_d; 0: as measured.
    """

    models: Models = Models()
    num_prefill: int = 2
    num_decode: int = 1
    ttft_slo_ms: float = 2200.0
    tbt_slo_ms: float = 27.5
    router_share: float = 0.9
    warm_up_s: float = 11.25
    expected_output_tokens: int = 300
    decode_ms: float = 0.0
    block_size_tokens: int = 0
    event_tokens: int = 1
    compress: float = 1.0

    def as_played(self) -> "Setup":
        """What router and engines are told: the same in the machine's time."""
        factor = self.compress
        return replace(
            self,
            models=self.models.faster(factor),
            ttft_slo_ms=self.ttft_slo_ms / factor,
            tbt_slo_ms=self.tbt_slo_ms / factor,
            decode_ms=self.decode_ms / factor,
        )


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Poisson arrivals of prompts that share nothing. `load`: as a multiple of the cluster's capacity.
    `setup.expected_output_tokens` is the mean of the outputs, which are exponential, as long as nobody knows
    them beforehand; prompts are uniform between half and one and a half times `prompt_tokens`."""

    setup: Setup = Setup()
    load: float = 2.0
    seconds: float = 45.0
    prompt_tokens: int = 2000
    seed: int = 0

    @property
    def output_tokens(self) -> int:
        return self.setup.expected_output_tokens

    @property
    def decode_ms(self) -> float:
        """t_d: of an output of mean length, with TBT at what the router is given."""
        return self.output_tokens * self.setup.tbt_slo_ms * self.setup.router_share

    @property
    def prefill_per_s(self) -> float:
        return self.setup.num_prefill * 1e3 / self.setup.models.prefill.compute_ms(self.prompt_tokens, 0)

    @property
    def decode_per_s(self) -> float:
        """With as many streams in a batch as TBT at the router's SLO allows. 0: not one."""
        model = self.setup.models.decode
        one_ms = model.tbt_ms(1, self.prompt_tokens + self.output_tokens / 2) - model.constant_ms
        batch = (self.setup.tbt_slo_ms * self.setup.router_share - model.constant_ms) / one_ms
        return self.setup.num_decode * max(batch, 0.0) * 1e3 / self.decode_ms

    @property
    def capacity_per_s(self) -> float:
        return min(self.prefill_per_s, self.decode_per_s)


def requests(plan: Plan, round_number: int) -> Iterator[Request]:
    """The same for every admission policy of a round."""
    rng = random.Random(f"{plan.seed}/{round_number}")
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(plan.load * plan.capacity_per_s)) < plan.seconds:
        length = round(plan.prompt_tokens * rng.uniform(0.5, 1.5))
        output = max(round(rng.expovariate(1 / plan.output_tokens)), 2)
        yield Request(at_s, [rng.randrange(VOCABULARY) for _ in range(length)], output)
