"""Runs of slices over a TCP connection, for peers that no card reaches."""

import queue
import threading
from collections.abc import Callable
from functools import partial

from kvcore.errors import KVError
from kvcore.transport.endpoints import EndpointKey
from kvcore.transport.engine.batch import Direction, RequestProgress
from kvcore.transport.engine.messages import REPLIES, Done, Link, ReadFrom, Refused, Reply, WriteTo
from kvcore.transport.slices import Run, Slice

TCP = "tcp"
"""Stands for the name of a card in paths that use none."""

_SLICES_IN_A_RUN = 16
_RUNS = 2  # one under way, one behind it


class TcpPath:
    """A thread of its own moves the bytes; the rest is the worker's. `on_end(path, run, reason)` is called by
    that thread, with an empty reason when all of the run is there."""

    def __init__(self, key: EndpointKey, link: Link, on_end: Callable[["TcpPath", Run, str], None]) -> None:
        self.key = key
        self._link = link
        self._on_end = on_end
        self._runs: list[Run] = []
        self._inbox: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="transfer-tcp", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        return bool(self._runs)

    def runs(self) -> list[Run]:
        """What is under way."""
        return list(self._runs)

    def room(self) -> int:
        return _SLICES_IN_A_RUN if len(self._runs) < _RUNS else 0

    def start(self, run: Run) -> None:
        self._runs.append(run)
        self._inbox.put(run)

    def ended(self, run: Run) -> bool:
        """False for a run that `close` has returned already."""
        if run not in self._runs:
            return False
        self._runs.remove(run)
        return True

    def close(self) -> list[Run]:
        """When it returns, the thread touches no memory any more. Returns what was under way."""
        self._link.cut()
        self._inbox.put(None)
        self._thread.join()
        self._link.close()
        left, self._runs = self._runs, []
        return left

    def _work(self) -> None:
        while (run := self._inbox.get()) is not None:
            try:
                reason = self._move(run)
            except KVError as error:
                reason = str(error)
            self._on_end(self, run, reason)

    def _move(self, run: Run) -> str:
        # All requests first: the peer works on them while the answers are on their way.
        for item in run.slices:
            self._ask(item)
        reason = ""
        for item in run.slices:
            reply, _ = self._link.receive(REPLIES, partial(self._place, item))
            if isinstance(reply, Refused):
                reason = reply.reason
            elif not isinstance(reply, Done):
                reason = f"the peer answered with a {type(reply).__name__}"
        return reason

    def _ask(self, item: Slice) -> None:
        progress = item.request
        assert isinstance(progress, RequestProgress)
        target = progress.request.target + item.offset
        if progress.request.direction is Direction.WRITE:
            self._link.send(WriteTo(target, item.size_bytes), self._view(progress, item))
        else:
            self._link.send(ReadFrom(target, item.size_bytes))

    def _place(self, item: Slice, reply: Reply) -> memoryview | None:
        progress = item.request
        assert isinstance(progress, RequestProgress)
        if not isinstance(reply, Done) or progress.request.direction is not Direction.READ:
            return None
        return self._view(progress, item)

    @staticmethod
    def _view(progress: RequestProgress, item: Slice) -> memoryview:
        return progress.local.view(progress.request.source + item.offset, item.size_bytes)
