"""The simulator's parts against what can be computed by hand or naively."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError
from kvsim.agenda import Agenda
from kvsim.batch import Batch
from kvsim.block_cache import BlockCache
from kvsim.decode_node import DecodeNode
from kvsim.engine_model import MODELS, EngineSpec, pipelined_prefill
from kvsim.intervals import later_first, tail_mean_ms
from kvsim.job import Job
from kvsim.network import Link, Network
from kvsim.trace import TraceRequest
from router.core.estimator import DecodeModel, PrefillModel


def test_kv_of_a_70b_token_has_320_kib_and_prefill_is_the_papers_formula() -> None:
    shape = MODELS["llama3-70b"]
    assert shape.kv_bytes_per_token == 320 * 1024
    n, p, d = 8192, 1024, 8192
    by_hand = 80 * (4 * (n**2 - p**2) * d + 22 * (n - p) * d**2)
    assert shape.prefill_flops(n, p) == by_hand
    engine = EngineSpec(prefill_constant_ms=0.0, prefill_efficiency=0.5)
    expected_ms = by_hand / (8 * 312e12 * 0.5) * 1e3
    assert engine.prefill_model().compute_ms(n, p) == pytest.approx(expected_ms)


def test_an_engine_that_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no memory for KV"):
        EngineSpec(gpus_per_node=1)
    with pytest.raises(ConfigError, match="no GPU 'abacus'"):
        EngineSpec(gpu="abacus")


def test_a_pipeline_multiplies_throughput_and_shortens_only_long_prompts() -> None:
    model = PrefillModel(0.0, 0.1, 1e-6)
    alone = pipelined_prefill(model, 64_000, 0, 1, 4000)
    group = pipelined_prefill(model, 64_000, 0, 4, 4000)
    assert group.occupied_ms == pytest.approx(alone.occupied_ms / 4)
    assert group.occupied_ms < group.latency_ms < alone.latency_ms / 2
    short = pipelined_prefill(model, 2_000, 0, 4, 4000)
    assert short.latency_ms == pytest.approx(model.compute_ms(2_000, 0))


def test_what_happens_together_happens_in_the_order_it_was_planned() -> None:
    agenda, seen = Agenda(), []
    for name, at in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        agenda.at(at, lambda now, n=name: seen.append((n, now)))
    agenda.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("c", 2.0)]


def test_two_flows_share_a_link_and_the_second_speeds_up_when_the_first_ends() -> None:
    agenda, done = Agenda(), {}
    network = Network(agenda, 0.0)
    link, other = Link(100.0), Link(1000.0)
    network.send([link, other], 100.0, lambda now: done.setdefault("short", now))
    network.send([link], 300.0, lambda now: done.setdefault("long", now))
    agenda.run()
    # Both get 50 until the short one is done at 2 s; then 200 bytes remain at 100.
    assert done == {"short": pytest.approx(2.0), "long": pytest.approx(4.0)}


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 1000)), min_size=1, max_size=20))
def test_a_link_is_never_idle_nor_overdrawn(flows: list[tuple[float, int]]) -> None:
    agenda, ends = Agenda(), []
    network, link = Network(agenda, 0.0), Link(100.0)
    for at, size in flows:
        agenda.at(at, lambda now, s=size: network.send([link], s, ends.append))
    agenda.run()
    clock = 0.0
    for at, size in sorted(flows):
        clock = max(clock, at) + size / 100.0
    assert len(ends) == len(flows) and max(ends) == pytest.approx(clock)


class NaiveCache:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.blocks = capacity, OrderedDict[bytes, None]()

    def leading(self, keys: list[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def keep(self, keys: list[bytes]) -> None:
        for key in reversed(keys[: self.leading(keys)]):
            self.blocks.move_to_end(key)
        kept = []
        for key in keys:
            if key in self.blocks:
                continue
            while len(self.blocks) + len(kept) + 1 > self.capacity:
                victim = next((k for k in self.blocks if k not in keys), None)
                if victim is None:
                    break
                del self.blocks[victim]
            if len(self.blocks) + len(kept) + 1 > self.capacity:
                break
            kept.append(key)
        for key in reversed(kept):
            self.blocks[key] = None


@given(st.integers(0, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=40))
def test_the_cache_is_a_plain_lru_with_the_stores_rules(
    capacity: int, prompts: list[tuple[int, int]]
) -> None:
    cache, naive = BlockCache("lru", capacity), NaiveCache(capacity)
    for document, length in prompts:
        keys = [bytes([document, i]) for i in range(length)]
        assert cache.leading(keys)[0] == naive.leading(keys)
        cache.keep(keys)
        naive.keep(keys)
        assert len(cache.dram) == len(naive.blocks) <= capacity
        assert all(key in cache.dram for key in naive.blocks)


def test_what_dram_evicts_goes_to_ssd_and_comes_back_when_used() -> None:
    cache = BlockCache("lru", 2, 2)
    first, second = [b"a0", b"a1"], [b"b0", b"b1"]
    cache.keep(first)
    changes = cache.keep(second)
    assert sorted(changes.to_ssd) == first and cache.leading(first) == (2, 2)
    changes = cache.keep(first)
    assert changes.to_dram == first and sorted(changes.from_ssd) == first
    assert cache.leading(first) == (2, 0) and cache.leading(second) == (2, 2)
    assert len(cache) == 4


def test_a_later_first_interval_makes_no_more_intervals() -> None:
    runs = [(10.0, 3), (20.0, 1)]
    assert list(later_first(runs, 5.0)) == [(15.0, 1), (10.0, 2), (20.0, 1)]
    assert later_first(runs, 0.0) == runs and later_first([], 5.0) == []


def test_the_tail_mean_is_that_of_the_longest_tenth() -> None:
    rng = random.Random(5)
    runs = [(rng.uniform(1, 100), rng.randint(1, 9)) for _ in range(50)]
    every = sorted((ms for ms, steps in runs for _ in range(steps)), reverse=True)
    longest = every[: round(len(every) * 0.1)]
    assert tail_mean_ms(runs) == pytest.approx(sum(longest) / len(longest))
    assert tail_mean_ms([]) == 0.0


def naive_decode(jobs: list[tuple[float, int, int]], model: DecodeModel) -> list[float]:
    """End of each (arrival, prompt, output), step by step, with room for everybody."""
    waiting = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    running: dict[int, list[int]] = {}
    ends, now = [0.0] * len(jobs), 0.0
    while waiting or running:
        if not running:
            now = max(now, jobs[waiting[0]][0])
        while waiting and jobs[waiting[0]][0] <= now:
            i = waiting.pop(0)
            running[i] = [jobs[i][1] + 1, jobs[i][2] - 1]
        now += model.tbt_ms(len(running), sum(kv for kv, _ in running.values())) / 1e3
        for i, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[i] = now
                del running[i]
    return ends


@given(
    st.lists(
        st.tuples(st.integers(0, 2000), st.integers(1, 5000), st.integers(2, 60)),
        min_size=1,
        max_size=12,
        unique_by=lambda job: job[0],
    )
)
def test_runs_of_steps_are_the_steps_one_by_one(drawn: list[tuple[int, int, int]]) -> None:
    # No two at once, and none just when a step ends: there the order is a matter of taste.
    jobs = [(at * 1e-3 + 0.000137, prompt, output) for at, prompt, output in drawn]
    model = DecodeModel(10.0317, 0.5, 1e-3)
    agenda, ends = Agenda(), {}
    node = DecodeNode(
        agenda,
        model,
        1 << 30,
        1000,
        lambda job, now: None,
        lambda job, now: ends.setdefault(job.outcome.number, now),
    )
    for number, (at, prompt, output) in enumerate(jobs):
        job = Job(number, TraceRequest(at, prompt, output), 512)
        agenda.at(at, lambda now, j=job: node.join(j, now))
    agenda.run()
    expected = naive_decode(jobs, model)
    assert [ends[i] for i in range(len(jobs))] == pytest.approx(expected, abs=1e-4)
    assert node.batch.kv_tokens == 0 and node.kv_share == 0.0


def test_a_full_node_makes_requests_wait_but_none_forever() -> None:
    agenda, joined, ended = Agenda(), [], []
    node = DecodeNode(
        agenda,
        DecodeModel(10.0, 0.0, 0.0),
        1000,
        2,
        lambda job, now: joined.append(now),
        lambda job, now: ended.append(now),
    )
    for number in range(5):
        node.join(Job(number, TraceRequest(0.0, 600 if number != 3 else 5000, 11), 512), 0.0)
    assert len(node.batch) == 1 and node.num_waiting == 4
    agenda.run()
    assert ended == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert joined == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_steps_within_is_the_least_number_that_takes_so_long() -> None:
    batch = Batch(DecodeModel(7.0, 0.3, 2e-3))
    for number in range(5):
        batch.add(Job(number, TraceRequest(0.0, 1000 * number + 1, 500), 512))
    for elapsed_ms in (0.0, 5.0, 100.0, 1234.5):
        steps = batch.steps_within(elapsed_ms)
        assert batch.run_ms(steps) >= elapsed_ms - 1e-6
        assert steps == 1 or batch.run_ms(steps - 1) < elapsed_ms
