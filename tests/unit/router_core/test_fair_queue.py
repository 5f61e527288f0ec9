from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from router.core.decision import RejectReason
from router.core.fair_queue import MAX_TENANTS, FairQueue
from router.core.view import RequestView


def request(request_id: str, tenant: str = "a", priority: int = 0, prompt_tokens: int = 100) -> RequestView:
    return RequestView(request_id, prompt_tokens, tenant=tenant, priority=priority)


def drain(queue: FairQueue) -> list[str]:
    order = []
    while (popped := queue.pop()) is not None:
        order.append(popped.request_id)
    return order


def queue_of(*requests: RequestView, **fields: dict[str, float]) -> FairQueue:
    queue = FairQueue(1000, 0.0, **fields)
    for waiting in requests:
        assert queue.push(waiting, 0.0) is None
    return queue


def test_one_tenant_keeps_its_order() -> None:
    assert drain(queue_of(request("1"), request("2"), request("3"))) == ["1", "2", "3"]


def test_lower_priority_numbers_go_first() -> None:
    assert drain(queue_of(request("1", priority=5), request("2"), request("3", priority=-1))) == [
        "3",
        "2",
        "1",
    ]


def test_a_flood_does_not_keep_another_tenant_waiting() -> None:
    flood = [request(f"a{n}") for n in range(50)]
    order = drain(queue_of(*flood, request("b0", "b"), request("b1", "b")))
    assert order.index("b0") <= 1 and order.index("b1") <= 3


def test_long_prompts_count_for_more() -> None:
    long = [request(f"a{n}", "a", prompt_tokens=1000) for n in range(10)]
    short = [request(f"b{n}", "b", prompt_tokens=100) for n in range(100)]
    first_half = drain(queue_of(*long, *short))[:55]
    assert Counter(name[0] for name in first_half) == {"a": 5, "b": 50}


def test_weights_are_shares() -> None:
    both = [request(f"{tenant}{n}", tenant) for tenant in "ab" for n in range(40)]
    first = drain(queue_of(*both, weights={"a": 3.0}))[:40]
    assert Counter(name[0] for name in first) == {"a": 30, "b": 10}


def test_output_counts_too() -> None:
    queue = queue_of(request("a0"), request("a1"), request("b0", "b"), request("b1", "b"), request("b2", "b"))
    assert queue.pop() is not None  # a0
    queue.charge("a", 0, output_tokens=100)
    assert drain(queue) == ["b0", "b1", "b2", "a1"]


def test_being_away_earns_no_credit() -> None:
    queue = queue_of(*(request(f"a{n}") for n in range(60)))
    for _ in range(30):
        queue.pop()
    for n in range(30):
        queue.push(request(f"b{n}", "b"), 0.0)
    first = drain(queue)[:20]
    assert Counter(name[0] for name in first) == {"a": 10, "b": 10}


def test_nor_does_it_when_the_queue_was_empty_meanwhile() -> None:
    queue = queue_of(*(request(f"a{n}") for n in range(30)))
    drain(queue)
    for n in range(20):
        queue.push(request(f"b{n}", "b"), 0.0)
        queue.push(request(f"c{n}", "a"), 0.0)
    assert Counter(name[0] for name in drain(queue)[:20]) == {"b": 10, "c": 10}


def test_full_and_expired_requests_are_told_so() -> None:
    queue = FairQueue(2, max_wait_ms=1000)
    assert queue.push(request("1"), 0.0) is None
    assert queue.push(request("2", "b"), 0.5) is None
    full = queue.push(request("3"), 0.6)
    assert full is not None and (full.reason, full.limit) == (RejectReason.QUEUE_FULL, 2)
    assert queue.expired(0.9) == []
    ((late, rejection),) = queue.expired(1.2)
    assert (late.request_id, rejection.reason) == ("1", RejectReason.QUEUE_TIMEOUT)
    assert drain(queue) == ["2"]


def test_cancelling() -> None:
    queue = queue_of(request("1"), request("2"))
    assert queue.cancel("1") and not queue.cancel("1")
    assert drain(queue) == ["2"]
    assert len(queue) == 0 and queue.pop() is None


def test_tenants_are_forgotten_but_never_those_that_wait() -> None:
    queue = queue_of(request("kept", "waiting"))
    for n in range(2 * MAX_TENANTS):
        queue.charge(f"t{n}", 1)
    assert queue.num_tenants <= MAX_TENANTS
    assert drain(queue) == ["kept"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "pop", "cancel"]),
        st.integers(0, 30),
        st.sampled_from("abc"),
        st.integers(-1, 1),
    )
)


@given(steps)
def test_nothing_is_lost_or_served_twice(steps: list[tuple[str, int, str, int]]) -> None:
    queue = FairQueue(10, 0.0)
    waiting: dict[str, RequestView] = {}
    for what, number, tenant, priority in steps:
        request_id = f"r{number}"
        if what == "push" and request_id not in waiting:
            new = request(request_id, tenant, priority)
            if queue.push(new, 0.0) is None:
                waiting[request_id] = new
            else:
                assert len(waiting) == 10
        elif what == "cancel":
            assert queue.cancel(request_id) == (waiting.pop(request_id, None) is not None)
        elif what == "pop":
            popped = queue.pop()
            assert (popped is None) == (not waiting)
            if popped is not None:
                assert popped.priority == min(r.priority for r in waiting.values())
                assert waiting.pop(popped.request_id) is popped
        assert len(queue) == len(waiting)
    assert sorted(drain(queue)) == sorted(waiting)
