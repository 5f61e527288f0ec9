"""What is offered to which cluster, and how much of it the cluster can take. Pure."""

import random
from collections.abc import Iterator

import msgspec

from router.core.estimator import DecodeModel, PrefillModel

ADMISSIONS = ("baseline", "early", "predictive", "predictive_request")
VOCABULARY = 1000


class Models(msgspec.Struct, frozen=True):
    """Of an engine, as `mooncake-router profile` prints them."""

    prefill: PrefillModel = PrefillModel()
    decode: DecodeModel = DecodeModel()


class Request(msgspec.Struct, frozen=True):
    at_s: float  # after the beginning
    prompt: list[int]
    output_tokens: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`load`: offered, as a multiple of the cluster's capacity; not counted before `warm_up_s`.

    `router_share`: the router is given this part of the SLOs, the rest is for what it does not predict (the
    first decode step, the network). Lengths are means: prompts are uniform between half and one and a half
    times that, outputs exponential, as long as nobody knows them beforehand.
    """

    models: Models = Models()
    num_prefill: int = 2
    num_decode: int = 1
    load: float = 2.0
    seconds: float = 45.0
    warm_up_s: float = 11.25
    prompt_tokens: int = 2000
    output_tokens: int = 300
    ttft_slo_ms: float = 2200.0
    tbt_slo_ms: float = 27.5
    router_share: float = 0.9
    seed: int = 0

    @property
    def decode_ms(self) -> float:
        """t_d: of an output of mean length, with TBT at what the router is given."""
        return self.output_tokens * self.tbt_slo_ms * self.router_share

    @property
    def prefill_per_s(self) -> float:
        return self.num_prefill * 1e3 / self.models.prefill.compute_ms(self.prompt_tokens, 0)

    @property
    def decode_per_s(self) -> float:
        """With as many streams in a batch as TBT at the router's SLO allows. 0: not one."""
        model = self.models.decode
        one_ms = model.tbt_ms(1, self.prompt_tokens + self.output_tokens / 2) - model.constant_ms
        batch = (self.tbt_slo_ms * self.router_share - model.constant_ms) / one_ms
        return self.num_decode * max(batch, 0.0) * 1e3 / self.decode_ms

    @property
    def capacity_per_s(self) -> float:
        return min(self.prefill_per_s, self.decode_per_s)


def requests(plan: Plan, round_number: int) -> Iterator[Request]:
    """Poisson arrivals; the same for every admission of a round."""
    rng = random.Random(f"{plan.seed}/{round_number}")
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(plan.load * plan.capacity_per_s)) < plan.seconds:
        length = round(plan.prompt_tokens * rng.uniform(0.5, 1.5))
        output = max(round(rng.expovariate(1 / plan.output_tokens)), 2)
        yield Request(at_s, [rng.randrange(VOCABULARY) for _ in range(length)], output)
