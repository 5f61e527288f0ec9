from collections import Counter

import pytest

from kvcore.errors import ConfigError
from kvcore.wire.events import BlockStored
from router.core.block_hash import block_hashes
from router.core.policies import POLICIES, make_policy
from router.core.policies.base import Policy
from router.core.prefix_index import PrefixIndex
from router.core.prng import SplitMix64
from router.core.settings import Settings
from router.core.view import ClusterView, InstanceState, RequestView

EMPTY = ClusterView()
REQUEST = RequestView("r", prompt_tokens=100)


def pool(*loads: int) -> tuple[InstanceState, ...]:
    return tuple(InstanceState(f"i{n}", in_flight_requests=load) for n, load in enumerate(loads))


def chosen(policy: Policy, instances: tuple[InstanceState, ...], request: RequestView = REQUEST) -> str:
    instance = policy.choose(request, instances, EMPTY, 0.0).instance
    assert instance is not None
    return instance.instance_id


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestEveryPolicy:
    """The contract."""

    def test_an_empty_pool_gives_nothing(self, name: str) -> None:
        choice = make_policy(name, Settings()).choose(REQUEST, (), EMPTY, 0.0)
        assert (choice.instance, choice.reason) == (None, "empty_pool")

    def test_one_instance_is_the_one(self, name: str) -> None:
        assert chosen(make_policy(name, Settings()), pool(99)) == "i0"

    def test_an_idle_cluster_is_used_evenly(self, name: str) -> None:
        # sglang#32983: at low load everything went to replica 0.
        policy = make_policy(name, Settings(seed=7))
        requests = (RequestView(f"r{n}", session_id=f"s{n}", prompt_tokens=9) for n in range(4000))
        counts = Counter(chosen(policy, pool(0, 0, 0, 0), request) for request in requests)
        assert all(800 < counts[f"i{n}"] < 1200 for n in range(4))

    def test_the_same_calls_give_the_same_choices(self, name: str) -> None:
        one, two = (make_policy(name, Settings(seed=3)) for _ in range(2))
        for n in range(50):
            request = RequestView(f"r{n}", session_id=f"s{n % 5}")
            instances = pool(n % 3, n % 2, n % 5)
            assert chosen(one, instances, request) == chosen(two, instances, request)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no routing policy .best.; there are: .*least_loaded, least_tbt"):
        make_policy("best", Settings())


def test_round_robin_takes_turns() -> None:
    policy = make_policy("round_robin", Settings())
    assert [chosen(policy, pool(9, 0, 0)) for _ in range(4)] == ["i0", "i1", "i2", "i0"]


def test_least_loaded_counts_everybodys_requests() -> None:
    policy = make_policy("least_loaded", Settings())
    foreign = InstanceState("i2", in_flight_requests=0, foreign_requests=9)
    choice = policy.choose(REQUEST, (*pool(3, 2), foreign), EMPTY, 0.0)
    assert choice.instance is not None and choice.instance.instance_id == "i1"
    assert [c.cost for c in choice.candidates] == [3, 2, 9]


def test_power_of_two_never_takes_the_worst() -> None:
    policy = make_policy("power_of_two", Settings(seed=1))
    counts = Counter(chosen(policy, pool(1, 5, 9)) for _ in range(3000))
    assert counts["i2"] == 0
    assert counts["i0"] == pytest.approx(2000, rel=0.1)


def test_random_follows_its_seed() -> None:
    runs = [
        [chosen(policy, pool(*range(8))) for _ in range(20)]
        for policy in (make_policy("random", Settings(seed=seed)) for seed in (1, 1, 2))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_a_session_stays_and_only_those_of_a_lost_instance_move() -> None:
    policy = make_policy("session_sticky", Settings())
    sessions = [RequestView("r", session_id=f"s{n}") for n in range(500)]
    instances = pool(0, 0, 0, 0)
    before = [chosen(policy, instances, session) for session in sessions]
    assert before == [chosen(policy, instances, session) for session in sessions]
    after = [chosen(policy, instances[:3], session) for session in sessions]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "i3")


def test_without_a_session_the_load_decides() -> None:
    assert chosen(make_policy("session_sticky", Settings()), pool(2, 1)) == "i1"


def cached_cluster() -> tuple[RequestView, ClusterView]:
    """i0 holds the whole prompt but is 300 ms behind, i1 half of it, i2 nothing."""
    index = PrefixIndex(16)
    tokens = list(range(8192))
    workers = [index.add_worker(f"i{n}", shared=True) for n in range(3)]
    names = [10_000 + n for n in range(512)]
    index.apply(workers[0], [BlockStored(names, None, tokens, 16)])
    index.apply(workers[1], [BlockStored(names[:256], None, tokens[: 256 * 16], 16)])
    queues_s = (0.3, 0.0, 0.0)
    instances = tuple(
        InstanceState(f"i{n}", worker, prefill_free_at=queue_s)
        for n, (worker, queue_s) in enumerate(zip(workers, queues_s, strict=True))
    )
    view = ClusterView(prefill=instances, prefix=index, worker_ids=index.worker_ids)
    return RequestView("r", prompt_tokens=8193, block_hashes=block_hashes(tokens, 16)), view


def test_cache_aware_weighs_prefix_and_queue_without_transfers() -> None:
    request, view = cached_cluster()
    choice = make_policy("cache_aware", Settings()).choose(request, view.prefill, view, 0.0)
    assert choice.instance is view.prefill[0]  # half a prompt costs more than its queue
    by_id = {c.instance_id: c for c in choice.candidates}
    assert {name: c.prefix_blocks for name, c in by_id.items()} == {"i0": 512, "i1": 256, "i2": 0}
    assert all(c.transfer_ms == 0 for c in choice.candidates)
    later = make_policy("cache_aware", Settings()).choose(request, view.prefill[1:], view, 0.0)
    assert later.instance is view.prefill[1]


def test_global_cache_aware_fetches_and_replicates() -> None:
    request, view = cached_cluster()
    choice = make_policy("global_cache_aware", Settings()).choose(request, view.prefill, view, 0.0)
    assert choice.instance is view.prefill[1]
    by_id = {c.instance_id: c for c in choice.candidates}
    assert by_id["i1"].transfer_ms > 0 and by_id["i1"].prefix_blocks == 512  # 512 / 256 reaches 2.0
    again = make_policy("global_cache_aware", Settings()).choose(request, view.prefill[::2], view, 0.0)
    assert again.instance is view.prefill[2]
    assert again.transfer is not None
    assert (again.transfer.source, again.transfer.target) == ("i0", "i2")
    assert (again.transfer.first_block, again.transfer.num_blocks) == (0, 512)


def test_least_tbt_expects_no_more_than_max_tokens() -> None:
    policy = make_policy("least_tbt", Settings(expected_output_tokens=300))
    full = (InstanceState("i0", kv_used_tokens=800, kv_capacity_tokens=1000),)
    assert policy.choose(RequestView("r", prompt_tokens=100), full, EMPTY, 0.0).short_of_kv_tokens == 200
    short = RequestView("r", prompt_tokens=100, max_tokens=50)
    assert policy.choose(short, full, EMPTY, 0.0).short_of_kv_tokens == 0


def test_splitmix_reference_and_bounds() -> None:
    # First outputs for seed 1234567 of the reference implementation (https://prng.di.unimi.it/splitmix64.c).
    prng = SplitMix64(1234567)
    assert [prng.next_u64() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert {prng.below(3) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"kvcache_balancing_threshold": 0.9},
        {"kvcache_balancing_threshold": float("nan")},
        {"sheddable_slo_share": 0.0},
        {"ttft_slo_ms": -1.0},
        {"tbt_slo_ms": float("inf")},
        {"expected_output_tokens": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Settings(**fields)  # type: ignore[arg-type]
