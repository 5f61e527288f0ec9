"""Spreads what is to be moved over the paths there are, and takes it to another one when a path fails."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvcore.transport.verbs import Opcode

# What is posted at once: a chain of so many requests, or fewer if they are large, so that all paths get a
# share of it; but not so few that the completion of each costs more than it moves.
LOAD_PIECES = 64
LOAD_BYTES = 4 << 20
MIN_LOAD_BYTES = 1 << 20


class Piece(NamedTuple):
    """Contiguous on both sides, and within one registration here."""

    local_address: int
    size_bytes: int
    pool_offset: int


class Move:
    """Pieces on their way; it has ended when `ok` is not None. `keep`: what must not be freed before that."""

    __slots__ = ("_gate", "_on_end", "is_cancelled", "is_failed", "keep", "num_loads", "ok", "opcode")

    def __init__(self, opcode: Opcode, keep: object, on_end: Callable[[], None] | None) -> None:
        self.opcode = opcode
        self.keep = keep
        self.ok: bool | None = None
        self.is_failed = False
        self.is_cancelled = False
        self.num_loads = 0
        self._on_end = on_end
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self, deadline: float) -> bool:
        """Whether it has ended by then, well or not."""
        if self.ok is None and self._gate.acquire(timeout=_timeout(deadline)):
            self._gate.release()
        return self.ok is not None

    def end(self) -> None:
        self.ok = not (self.is_failed or self.is_cancelled)
        self.keep = None
        self._gate.release()
        if self._on_end is not None:
            self._on_end()


class Load:
    """What one chain takes. `tried`: the paths that have failed with it."""

    __slots__ = ("move", "pieces", "size_bytes", "tried")

    def __init__(self, move: Move, pieces: list[Piece]) -> None:
        self.move = move
        self.pieces = pieces
        self.size_bytes = sum(piece.size_bytes for piece in pieces)
        self.tried: set[Path] = set()


class Path(Protocol):
    """One way to the store. A path that fails gives its loads back by `Mover.returned`."""

    @property
    def is_live(self) -> bool: ...

    @property
    def queued_bytes(self) -> int: ...

    def enqueue(self, load: Load) -> bool:
        """False: this path cannot take it. Never waits."""
        ...

    def withdraw(self, move: Move) -> None:
        """When this returns, nothing of `move` is on this path, and no device touches its memory for it."""
        ...


class Mover:
    """Thread-safe."""

    def __init__(self) -> None:
        self.paths: Sequence[Path] = ()
        self.moved_bytes = 0
        self.retried_loads = 0
        self._lock = threading.Lock()

    @property
    def num_live(self) -> int:
        return sum(path.is_live for path in self.paths)

    def start(
        self,
        opcode: Opcode,
        pieces: Sequence[Piece],
        keep: object = None,
        on_end: Callable[[], None] | None = None,
    ) -> Move:
        """Returns at once. `on_end` is called by whichever thread sees the end, perhaps before this
        returns."""
        move = Move(opcode, keep, on_end)
        share_bytes = sum(piece.size_bytes for piece in pieces) // max(1, self.num_live)
        load_bytes = min(LOAD_BYTES, max(MIN_LOAD_BYTES, share_bytes))
        loads = [Load(move, run) for run in cut_loads(pieces, load_bytes)]
        if not loads:
            move.end()
            return move
        move.num_loads = len(loads)
        for load in loads:
            self._place(load)
        return move

    def cancel(self, move: Move) -> None:
        """Ends it, not well; when this returns no device touches its memory. Costs paths on which it is in
        flight their queue pairs: there is no other way to call back a request."""
        move.is_cancelled = True
        for path in self.paths:
            path.withdraw(move)
        move.wait(float("inf"))

    def arrived(self, load: Load) -> None:
        self._ended(load, ok=True)

    def returned(self, path: Path, loads: Sequence[Load]) -> None:
        """`path` has failed with these and does not touch their memory any more."""
        for load in loads:
            load.tried.add(path)
            if not load.move.is_cancelled:
                with self._lock:
                    self.retried_loads += 1
            self._place(load)

    def _place(self, load: Load) -> None:
        while not (load.move.is_cancelled or load.move.is_failed):
            usable = [path for path in self.paths if path.is_live and path not in load.tried]
            if not usable:
                break
            path = min(usable, key=lambda path: path.queued_bytes)
            if path.enqueue(load):
                return
            load.tried.add(path)
        self._ended(load, ok=False)

    def _ended(self, load: Load, *, ok: bool) -> None:
        move = load.move
        with self._lock:
            if ok:
                self.moved_bytes += load.size_bytes
            else:
                move.is_failed = True
            move.num_loads -= 1
            is_last = not move.num_loads
        if is_last:
            move.end()


def cut_loads(pieces: Sequence[Piece], load_bytes: int) -> list[list[Piece]]:
    loads: list[list[Piece]] = []
    size_bytes = load_bytes
    for piece in pieces:
        if size_bytes + piece.size_bytes > load_bytes or len(loads[-1]) == LOAD_PIECES:
            loads.append([])
            size_bytes = 0
        loads[-1].append(piece)
        size_bytes += piece.size_bytes
    return loads


def _timeout(deadline: float) -> float:
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
