"""Bookkeeping of the cluster."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.wire.events import BlockStored
from router.core.block_hash import block_hashes
from router.core.cluster_book import ClusterBook
from router.core.decision import Choice, Transfer
from router.core.load_report import LoadReport
from router.core.policies import make_policy
from router.core.prefix_index import PrefixIndex
from router.core.scheduler import Scheduler
from router.core.settings import Settings
from router.core.view import RequestView, Role


def report(at: float, running: int = 0, waiting: int = 0, **fields: int) -> LoadReport:
    return LoadReport(sampled_at=at, running_requests=running, waiting_requests=waiting, **fields)


class Cluster:
    """Two prefill and two decode instances, a store node, Algorithm 1."""

    def __init__(self) -> None:
        settings = Settings()
        self.index = PrefixIndex(16)
        self.book = ClusterBook(settings, self.index)
        self.book.add_store_node("store-1")
        self.book.add_instance("p0", Role.PREFILL, store_node="store-1")
        self.book.add_instance("p1", Role.PREFILL)
        self.book.add_instance("d0", Role.DECODE, kv_capacity_tokens=10_000)
        self.book.add_instance("d1", Role.DECODE, kv_capacity_tokens=10_000)
        self.scheduler = Scheduler(
            make_policy("global_cache_aware", settings), make_policy("least_tbt", settings), settings
        )

    def send(self, request_id: str, now: float, prompt_tokens: int = 1000) -> tuple[str, str]:
        request = RequestView(request_id, prompt_tokens, block_hashes(range(prompt_tokens), 16))
        decision = self.scheduler.schedule(request, self.book.view(now), now)
        assert decision.prefill is not None and decision.decode is not None
        self.book.sent(request, decision, now)
        return decision.prefill.instance_id, decision.decode.instance_id

    def in_flight(self, now: float) -> dict[str, int]:
        view = self.book.view(now)
        return {i.instance_id: i.in_flight_requests for i in (*view.mixed, *view.prefill, *view.decode)}


def test_a_request_is_counted_where_it_is_and_not_after() -> None:
    cluster = Cluster()
    p, d = cluster.send("r", 0.0)
    assert cluster.in_flight(0.0) == {"p0": 0, "p1": 0, "d0": 0, "d1": 0} | {p: 1, d: 1}
    cluster.book.first_token("r", 0.5)
    assert cluster.in_flight(0.5)[p] == 0 and cluster.in_flight(0.5)[d] == 1
    cluster.book.ended("r", 2.0, output_tokens=50)
    assert set(cluster.in_flight(2.0).values()) == {0}
    assert (cluster.book.num_requests, len(cluster.book.forecast)) == (0, 0)
    assert cluster.book.history.expected_tokens("default", 1000, 0) == pytest.approx(50)


def test_a_burst_of_equal_prompts_stays_together_before_any_event() -> None:
    cluster = Cluster()
    first, _ = cluster.send("r0", 0.0)
    cluster.book.first_token("r0", 0.11)
    later = {cluster.send(f"r{n}", 0.12)[0] for n in range(1, 6)}
    assert later == {first}


def test_different_prompts_spread() -> None:
    cluster = Cluster()
    placed = []
    for n in range(6):
        request = RequestView(f"r{n}", 1000, block_hashes(range(n * 1000, n * 1000 + 1000), 16))
        decision = cluster.scheduler.schedule(request, cluster.book.view(0.0), 0.0)
        cluster.book.sent(request, decision, 0.0)
        assert decision.prefill is not None
        placed.append(decision.prefill.instance_id)
    assert sorted(placed) == ["p0"] * 3 + ["p1"] * 3


def test_the_store_node_on_an_instances_host_is_local_to_it() -> None:
    cluster = Cluster()
    tokens = list(range(960))
    names = list(range(60))
    node = next(worker for worker, name in cluster.index.worker_ids.items() if name == "store-1")
    cluster.index.apply(node, [BlockStored(names, None, tokens, 16)])
    assert {cluster.send(f"r{n}", float(n), 960)[0] for n in range(4)} == {"p0"}


def test_a_failed_prefill_leaves_the_decode() -> None:
    cluster = Cluster()
    p, d = cluster.send("r", 0.0)
    cluster.book.prefill_failed("r", 0.1)
    assert cluster.in_flight(0.1)[p] == 0 and cluster.in_flight(0.1)[d] == 1
    cluster.book.ended("r", 0.2)
    assert set(cluster.in_flight(0.2).values()) == {0}
    assert cluster.book.history.expected_tokens("default", 1000, 0) == Settings().expected_output_tokens


def test_unavailable_and_removed_instances_are_not_in_the_view() -> None:
    cluster = Cluster()
    p, _ = cluster.send("r", 0.0)
    cluster.book.set_available("d0", False)
    cluster.book.remove(p)
    assert p not in cluster.in_flight(0.0) and "d0" not in cluster.in_flight(0.0)
    assert p not in cluster.book.view(0.0).worker_ids.values()
    cluster.book.first_token("r", 0.1)
    cluster.book.ended("r", 0.2, output_tokens=3)
    cluster.book.polled(p, report(0.3))
    cluster.book.set_available("d0", True)
    assert set(cluster.in_flight(0.3).values()) == {0}


def test_transfers_under_way_are_counted_by_source() -> None:
    cluster = Cluster()
    transfer = Transfer("store-1", "p1", 0, 10)
    cluster.book.transfer_started(transfer)
    cluster.book.transfer_started(transfer)
    assert list(cluster.book.view(0.0).transfers_from.values()) == [2]
    cluster.book.transfer_ended(transfer)
    cluster.book.transfer_ended(transfer)
    cluster.book.transfer_ended(transfer)
    assert not cluster.book.view(0.0).transfers_from


def test_mixed_instances_without_an_index() -> None:
    settings = Settings()
    book = ClusterBook(settings)
    book.add_instance("m0", Role.MIXED)
    scheduler = Scheduler(
        make_policy("least_loaded", settings), make_policy("least_loaded", settings), settings
    )
    request = RequestView("r", 100)
    decision = scheduler.schedule(request, book.view(0.0), 0.0)
    book.sent(request, decision, 0.0)
    (state,) = book.view(0.0).mixed
    assert (state.in_flight_requests, state.running_requests) == (1, 1)
    assert state.queue_ms(0.0) == pytest.approx(decision.ttft_ms)
    book.first_token("r", 0.1)
    book.ended("r", 0.2, 5)
    assert book.view(0.2).mixed[0].in_flight_requests == 0


action = st.tuples(
    st.sampled_from(["send", "first", "fail", "end", "cancel", "poll", "remove"]),
    st.integers(0, 5),
    st.integers(0, 3),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(action, max_size=60))
def test_counters_return_to_zero_whatever_happens(actions: list[tuple[str, int, int]]) -> None:
    cluster = Cluster()
    book, now = cluster.book, 0.0
    names = ["p0", "p1", "d0", "d1"]
    removed = set()
    under_way = set()
    for what, number, which in actions:
        now += 0.1
        request_id = f"r{number}"
        if what == "send" and request_id not in under_way and not removed & {"d0", "d1"}:
            request = RequestView(request_id, 1000, block_hashes(range(1000), 16))
            decision = cluster.scheduler.schedule(request, book.view(now), now)
            book.sent(request, decision, now)
            under_way.add(request_id)
        elif what == "first":
            book.first_token(request_id, now)
        elif what == "fail":
            book.prefill_failed(request_id, now)
        elif what in ("end", "cancel"):
            book.ended(request_id, now, output_tokens=7 if what == "end" else 0)
            under_way.discard(request_id)
        elif what == "poll":
            book.polled(names[which], report(now - 0.05, running=number, waiting=which))
        elif what == "remove" and which < 2 and names[which] not in removed:
            removed.add(names[which])
            book.remove(names[which])
    for request_id in under_way:
        book.ended(request_id, now)
    for name in names:
        book.polled(name, report(now))
    view = book.view(now)
    for state in (*view.prefill, *view.decode):
        assert (state.load, state.running_requests, state.kv_used_tokens) == (0, 0, 0)
        assert state.backlog_ms == 0
        assert state.queue_ms(now) == 0
    assert (book.num_requests, len(book.forecast)) == (0, 0)


class TestMoves:
    """A leg that failed goes to another instance."""

    def test_a_prefill_moves_and_its_decode_stays(self) -> None:
        cluster = Cluster()
        p, d = cluster.send("r", 0.0)
        other = next(i for i in ("p0", "p1") if i != p)
        state = next(i for i in cluster.book.view(0.0).prefill if i.instance_id == other)
        cluster.book.prefill_moved("r", Choice(state, "retry", compute_ms=100.0), now=0.1)
        loads = cluster.in_flight(0.1)
        assert (loads[p], loads[other], loads[d]) == (0, 1, 1)
        cluster.book.ended("r", 0.2)
        assert set(cluster.in_flight(0.2).values()) == {0}

    def test_a_decode_moves_and_its_prefill_stays(self) -> None:
        cluster = Cluster()
        p, d = cluster.send("r", 0.0)
        other = next(i for i in ("d0", "d1") if i != d)
        state = next(i for i in cluster.book.view(0.0).decode if i.instance_id == other)
        cluster.book.decode_moved("r", Choice(state, "retry", predicted_ms=20.0), now=0.1)
        loads = cluster.in_flight(0.1)
        assert (loads[p], loads[d], loads[other]) == (1, 0, 1)
        cluster.book.ended("r", 0.2)
        assert set(cluster.in_flight(0.2).values()) == {0}


def test_a_complete_answer_leaves_its_prefix_whatever_was_seen_of_it() -> None:
    for completed, held in ((True, 62), (False, 0)):
        cluster = Cluster()
        p, _ = cluster.send("r", 0.0)
        cluster.book.ended("r", 1.0, completed=completed)
        view = cluster.book.view(1.0)
        instance = next(i for i in view.prefill if i.instance_id == p)
        match = cluster.index.match(block_hashes(range(1000), 16), 1.0)
        assert match.local_blocks_of([instance]) == [held]
