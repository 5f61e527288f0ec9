"""How loads are spread over paths and taken elsewhere when a path fails; the order of commits."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from kvcore.transport.commit_order import CommitOrder
from kvcore.transport.rdma_mover import LOAD_BYTES, LOAD_PIECES, Load, Move, Mover, Piece, cut_loads
from kvcore.transport.verbs import Opcode


class ScriptedPath:
    """Holds what is enqueued until it is told what becomes of it."""

    def __init__(self, mover: Mover) -> None:
        self.mover = mover
        self.is_live = True
        self.refuses = False
        self.loads: list[Load] = []

    @property
    def queued_bytes(self) -> int:
        return sum(load.size_bytes for load in self.loads)

    def enqueue(self, load: Load) -> bool:
        if not self.refuses:
            self.loads.append(load)
        return not self.refuses

    def withdraw(self, move: Move) -> None:
        own = [load for load in self.loads if load.move is move]
        self.loads = [load for load in self.loads if load.move is not move]
        self.mover.returned(self, own)

    def arrive(self) -> None:
        self.mover.arrived(self.loads.pop(0))

    def fail(self) -> None:
        self.is_live = False
        loads, self.loads = self.loads, []
        self.mover.returned(self, loads)


def rig(num_paths: int) -> tuple[Mover, list[ScriptedPath]]:
    mover = Mover()
    paths = [ScriptedPath(mover) for _ in range(num_paths)]
    mover.paths = paths
    return mover, paths


def pieces(count: int, size_bytes: int = LOAD_BYTES) -> list[Piece]:
    return [Piece(1 + index, size_bytes, index) for index in range(count)]


@given(st.lists(st.integers(1, 2 * LOAD_BYTES), max_size=200), st.integers(1, LOAD_BYTES))
def test_loads_are_what_a_chain_takes(sizes_bytes: list[int], load_bytes: int) -> None:
    everything = [Piece(index, size, index) for index, size in enumerate(sizes_bytes)]
    loads = cut_loads(everything, load_bytes)
    assert [piece for load in loads for piece in load] == everything
    for load in loads:
        assert 1 <= len(load) <= LOAD_PIECES
        assert len(load) == 1 or sum(piece.size_bytes for piece in load) <= load_bytes


def test_paths_share_the_work() -> None:
    mover, paths = rig(3)
    move = mover.start(Opcode.WRITE, pieces(9))
    assert [len(path.loads) for path in paths] == [3, 3, 3]
    for path in paths:
        while path.loads:
            assert move.ok is None
            path.arrive()
    assert move.ok and mover.moved_bytes == 9 * LOAD_BYTES


def test_what_a_path_fails_with_is_taken_to_another_one() -> None:
    mover, paths = rig(2)
    move = mover.start(Opcode.READ, pieces(4))
    paths[0].fail()
    assert len(paths[1].loads) == 4 and mover.retried_loads == 2
    while paths[1].loads:
        paths[1].arrive()
    assert move.ok


def test_without_another_path_the_move_fails_when_nothing_is_on_its_way_any_more() -> None:
    mover, paths = rig(2)
    ended = threading.Event()
    move = mover.start(Opcode.READ, pieces(2), on_end=ended.set)
    paths[0].fail()
    assert move.ok is None
    paths[1].fail()
    assert move.ok is False and ended.is_set() and move.wait(0.0)


def test_a_path_that_refuses_is_passed_over() -> None:
    mover, paths = rig(2)
    paths[0].refuses = True
    move = mover.start(Opcode.WRITE, pieces(2))
    assert len(paths[1].loads) == 2
    paths[1].fail()
    assert move.ok is False


def test_no_live_path_fails_at_once() -> None:
    mover, paths = rig(1)
    paths[0].is_live = False
    assert mover.start(Opcode.WRITE, pieces(1)).ok is False
    assert mover.num_live == 0


def test_nothing_to_move_is_moved() -> None:
    mover, _ = rig(1)
    assert mover.start(Opcode.WRITE, []).ok


def test_a_cancelled_move_is_on_no_path_any_more_and_others_go_on() -> None:
    mover, paths = rig(2)
    doomed, other = mover.start(Opcode.READ, pieces(4)), mover.start(Opcode.READ, pieces(2))
    mover.cancel(doomed)
    assert doomed.ok is False
    assert {load.move for path in paths for load in path.loads} == {other}
    for path in paths:
        while path.loads:
            path.arrive()
    assert other.ok


def test_memory_is_kept_until_the_move_has_ended() -> None:
    mover, paths = rig(1)
    move = mover.start(Opcode.WRITE, pieces(1), keep="memory")
    assert move.keep == "memory"
    paths[0].arrive()
    assert move.keep is None


@given(st.permutations(range(6)))
def test_commits_go_out_in_the_order_of_their_submission(ready_order: list[int]) -> None:
    order = CommitOrder()
    sent: list[int] = []

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number
            self.ready = False

        def is_ready(self) -> bool:
            return self.ready

        def send(self) -> None:
            sent.append(self.number)

    items = [Item(number) for number in range(6)]
    for item in items:
        order.add(item)
    for number in ready_order:
        items[number].ready = True
        order.pump()
        expected = 0
        while expected < 6 and items[expected].ready:
            expected += 1
        assert sent == list(range(expected))
    assert sent == list(range(6))
