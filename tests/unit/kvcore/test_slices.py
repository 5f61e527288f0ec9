"""Slices over paths, with failures of any kind, against what must always hold."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.transport.endpoints import EndpointKey
from kvcore.transport.slices import RetryPolicy, Route, Run, Slice, Spreader, cut

A, B, C = (EndpointKey("peer", name, f"{name}'") for name in "abc")
ROUTE = Route("family", ((A, B), (C,)))


def always(path: EndpointKey) -> int:
    return 100


def nobody(path: EndpointKey) -> None:
    raise AssertionError(f"{path} has room")


def sizes(slices: list[Slice]) -> list[tuple[int, int]]:
    return [(item.offset, item.size_bytes) for item in slices]


def next_run(spreader: Spreader, now_s: float, room: int = 100) -> Run:
    run = spreader.assign(now_s, lambda path: room, nobody)
    assert run is not None
    return run


@given(length=st.integers(1, 10_000), slice_bytes=st.integers(1, 3_000))
def test_slices_cover_a_request_once(length: int, slice_bytes: int) -> None:
    slices = cut("r", ROUTE, length, slice_bytes)
    position = 0
    for item in slices:
        assert item.offset == position and 0 < item.size_bytes < 2 * slice_bytes
        position += item.size_bytes
    assert position == length
    assert all(item.size_bytes == slice_bytes for item in slices[:-1])


def test_a_short_rest_travels_with_the_slice_before_it() -> None:
    assert sizes(cut("r", ROUTE, 1100, 500)) == [(0, 500), (500, 600)]
    assert sizes(cut("r", ROUTE, 1300, 500)) == [(0, 500), (500, 500), (1000, 300)]
    assert sizes(cut("r", ROUTE, 7, 500)) == [(0, 7)]


def test_slices_are_spread_over_the_best_tier() -> None:
    spreader = Spreader()
    spreader.add(cut("r", ROUTE, 4000, 1000))
    first, second = next_run(spreader, 0), next_run(spreader, 0)
    assert {first.path, second.path} == {A, B}
    assert [len(first.slices), len(second.slices)] == [2, 1]
    assert next_run(spreader, 0).path == second.path
    other = Route("other family", ((A,),))
    spreader.add([*cut("r", ROUTE, 10, 10), *cut("s", other, 10, 10)])
    assert {next_run(spreader, 0).slices[0].request for _ in range(2)} == {"r", "s"}
    assert len(spreader) == 0


def test_a_path_that_is_full_is_wanted_and_another_one_used() -> None:
    spreader = Spreader()
    spreader.add(cut("r", ROUTE, 2000, 1000))
    wanted: list[EndpointKey] = []
    run = spreader.assign(0, lambda path: int(path == B), wanted.append)
    assert run is not None and run.path == B and wanted == [A]
    assert spreader.assign(0, lambda path: 0, wanted.append) is None
    assert wanted == [A, A, B] and len(spreader) == 1


def test_a_failed_path_is_avoided_and_tried_again_later() -> None:
    spreader = Spreader(RetryPolicy(avoid_s=1, max_avoid_s=3))
    spreader.add(cut("r", ROUTE, 10, 10))
    run = next_run(spreader, 0)
    assert run.path == A and spreader.failed(run, 0, own_card=False) == []
    retry = next_run(spreader, 0)
    assert retry.path == B
    spreader.done(retry)
    for now_s, avoided in ((0.5, True), (0.99, True), (1.0, False)):
        assert spreader.is_avoided(A, now_s) is avoided
    # Twice as long the second time, never longer than the longest, forgotten by a success.
    for now_s, until_s in ((1.0, 3.0), (3.0, 6.0), (6.0, 9.0)):
        spreader.avoid(A, now_s)
        spreader.avoid(A, now_s + 0.1)
        assert spreader.is_avoided(A, until_s - 0.1) and not spreader.is_avoided(A, until_s)
    assert spreader.avoided(8.0) == ["a to peer a'"]
    spreader.add(cut("r", Route("f", ((A,),)), 10, 10))
    spreader.done(next_run(spreader, 9))
    spreader.avoid(A, 10)
    assert not spreader.is_avoided(A, 11)


def test_a_bad_card_takes_all_its_paths_with_it() -> None:
    elsewhere = EndpointKey("other peer", "a", "x")
    spreader = Spreader()
    spreader.add(cut("r", ROUTE, 10, 10))
    spreader.failed(next_run(spreader, 0), 0, own_card=True)
    assert spreader.is_avoided(elsewhere, 0.5) and not spreader.is_avoided(B, 0.5)


def test_a_path_that_cannot_be_made_is_an_attempt() -> None:
    spreader = Spreader(RetryPolicy(max_attempts=2))
    spreader.add(cut("r", ROUTE, 30, 10))
    spreader.add(cut("s", Route("g", ((C,),)), 10, 10))
    assert spreader.refused(A, 0, own_card=False) == [] and len(spreader) == 4
    other, run = next_run(spreader, 0), next_run(spreader, 0)
    assert other.path == C and run.path == B and len(run.slices) == 2
    given_up = spreader.failed(run, 0, own_card=False)
    assert [item.request for item in given_up] == ["r", "r"] and len(spreader) == 1
    left = spreader.refused(C, 0, own_card=False)
    assert [item.request for item in left] == ["r"] and len(spreader) == 0


def test_when_all_are_avoided_the_one_that_returns_first_is_tried() -> None:
    spreader = Spreader()
    for path, now_s in ((A, 0.5), (B, 0.2), (C, 0.4)):
        spreader.avoid(path, now_s)
    spreader.add(cut("r", ROUTE, 10, 10))
    assert next_run(spreader, 0.6).path == B


def test_a_slice_is_given_up_in_the_end() -> None:
    spreader = Spreader(RetryPolicy(max_attempts=5))
    spreader.add(cut("r", ROUTE, 10, 10))
    paths, given_up = [], []
    while not given_up:
        run = next_run(spreader, 0)
        paths.append(run.path)
        given_up = spreader.failed(run, 0, own_card=False)
    assert len(paths) == 5 and set(paths[:3]) == {A, B, C}
    assert given_up[0].request == "r" and len(spreader) == 0


def test_what_is_given_back_was_no_attempt() -> None:
    spreader = Spreader(RetryPolicy(max_attempts=1))
    spreader.add(cut("r", ROUTE, 30, 10))
    run = next_run(spreader, 0)
    spreader.give_back(run)
    assert len(spreader) == 3 and next_run(spreader, 0).slices == run.slices


def test_waiting_slices_can_be_taken_out() -> None:
    spreader = Spreader()
    spreader.add([*cut("r", ROUTE, 20, 10), *cut("s", ROUTE, 10, 10)])
    assert sizes(spreader.drop(lambda item: item.request == "r")) == [(0, 10), (10, 10)]
    assert next_run(spreader, 0).slices[0].request == "s"


@dataclass
class World:
    """Carries runs as hypothesis wants it, and keeps count of what must hold."""

    num_slices: int
    policy: RetryPolicy
    spreader: Spreader = field(init=False)
    under_way: list[Run] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    history: dict[int, list[EndpointKey]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spreader = Spreader(self.policy)
        self.spreader.add(cut("r", ROUTE, self.num_slices * 10, 10))

    def assign(self, now_s: float, room: int) -> None:
        run = self.spreader.assign(now_s, lambda path: room, lambda path: None)
        if run is None:
            assert room == 0 or len(self.spreader) == 0
            return
        assert 1 <= len(run.slices) <= room
        self.under_way.append(run)
        for item in run.slices:
            assert item.offset not in self.done | self.given_up
            visited = self.history.setdefault(item.offset, [])
            # Each round goes through all paths before any comes up again.
            assert run.path not in visited[len(visited) // 3 * 3 :]
            visited.append(run.path)

    def end(self, index: int, success: bool, now_s: float, own_card: bool) -> None:
        run = self.under_way.pop(index % len(self.under_way))
        if success:
            self.spreader.done(run)
            self.done |= {item.offset for item in run.slices}
        else:
            given_up = self.spreader.failed(run, now_s, own_card=own_card)
            self.given_up |= {item.offset for item in given_up}
            assert all(len(self.history[item.offset]) == self.policy.max_attempts for item in given_up)

    def count(self) -> int:
        return len(self.done) + len(self.given_up) + len(self.spreader)


@given(data=st.data(), num_slices=st.integers(1, 12), max_attempts=st.integers(1, 7))
def test_no_slice_is_lost_or_carried_twice(data: st.DataObject, num_slices: int, max_attempts: int) -> None:
    world = World(num_slices, RetryPolicy(max_attempts=max_attempts))
    now_s = 0.0
    for _ in range(data.draw(st.integers(0, 60))):
        now_s += data.draw(st.floats(0, 2))
        if world.under_way and data.draw(st.booleans()):
            world.end(
                data.draw(st.integers(0, 100)), data.draw(st.booleans()), now_s, data.draw(st.booleans())
            )
        else:
            world.assign(now_s, data.draw(st.integers(0, 4)))
        moving = sum(len(run.slices) for run in world.under_way)
        assert world.count() + moving == num_slices
    while world.count() < num_slices or len(world.spreader):
        if world.under_way:
            world.end(0, True, now_s, False)
        else:
            world.assign(now_s, 4)
    assert world.done.isdisjoint(world.given_up)


@pytest.mark.parametrize("attempts", [1, 3])
def test_load_is_forgotten_with_what_carried_it(attempts: int) -> None:
    spreader = Spreader(RetryPolicy(max_attempts=9))
    spreader.add(cut("r", ROUTE, 100, 10))
    runs = [next_run(spreader, 0, 2) for _ in range(attempts)]
    for run in runs:
        spreader.failed(run, 0, own_card=False)
    while len(spreader):
        spreader.done(next_run(spreader, 100))
    assert spreader._load_bytes == {}
