"""The one thread that owns all that moves: it posts runs of slices, sees them end, and decides what comes
next."""

import contextlib
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from kvcore.errors import KVError
from kvcore.transport.endpoints import EndpointKey, EndpointPool
from kvcore.transport.engine.batch import Batch, RequestProgress
from kvcore.transport.engine.cards import Card
from kvcore.transport.engine.connector import Connector, Path, Unreachable
from kvcore.transport.engine.counters import EngineCounters
from kvcore.transport.engine.rdma_path import CHAINS, RdmaPath
from kvcore.transport.engine.tcp_path import TcpPath
from kvcore.transport.slices import RetryPolicy, Run, Slice, Spreader
from kvcore.transport.verbs import Completion, RdmaUnavailable, status_name

logger = logging.getLogger(__name__)

_EVENT_BYTES = 8


class Worker:
    """`submit` and `on_tcp_end` may be called from any thread, everything else is called by its own.
    `on_done`: all requests of a batch have ended."""

    def __init__(
        self,
        cards: Mapping[str, Card],
        counters: EngineCounters,
        *,
        max_endpoints: int,
        retry: RetryPolicy,
        on_done: Callable[[Batch], None],
    ) -> None:
        self._cards = cards
        self._counters = counters
        self._on_done = on_done
        self._spreader = Spreader(retry)
        self._pool: EndpointPool[Path] = EndpointPool(max_endpoints)
        self._by_serial: dict[int, RdmaPath] = {}
        self._batches: set[Batch] = set()
        self._expired: set[Batch] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wanted: dict[EndpointKey, None] = {}
        self._armed: set[str] = set()
        self._wake_lock = threading.Lock()
        self._is_closing = False
        self._is_closed = False
        self._connector: Connector
        self._thread = threading.Thread(target=self._run, name="transfer-worker", daemon=True)

    def start(self, connector: Connector) -> None:
        self._connector = connector
        self._thread.start()

    def submit(self, batch: Batch, slices: Sequence[Slice]) -> None:
        def begin() -> None:
            if self._is_closing:
                self._lose(slices, "the engine is closed")
                return
            self._batches.add(batch)
            self._spreader.add(slices)

        if not self._call(begin):
            self._lose(slices, "the engine is closed")

    def on_tcp_end(self, path: TcpPath, run: Run, reason: str) -> None:
        def end() -> None:
            if not path.ended(run):
                return
            if reason:
                self._break(path, [run], reason, own_card=False)
            else:
                self._through(run)

        self._call(end)

    def close(self) -> None:
        """Fails what is under way and ends the thread, and the connector."""

        def stop() -> None:
            self._is_closing = True

        self._call(stop)
        self._thread.join()

    # ---- the thread

    def _call(self, work: Callable[[], None]) -> bool:
        """False when the thread has ended, and nobody will do it."""
        with self._wake_lock:
            if self._is_closed:
                return False
            self._inbox.put(work)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            # Whoever waits must not wait for ever.
            logger.exception("the transfer engine has failed; this is a bug")
            self._is_closing = True
        self._shut_down()

    def _work(self) -> None:
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        by_fd = {card.completions.fd: card for card in self._cards.values()}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        while True:
            self._step()
            if self._is_closing:
                break
            # What completes between the last look and arming makes no event, so look once more.
            if self._arm() and self._reap():
                continue
            for fd, _ in poller.poll(self._patience_ms()):
                if fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                else:
                    by_fd[fd].completions.take_event()
                    self._armed.discard(by_fd[fd].name)

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _step(self) -> None:
        self._drain()
        self._reap()
        self._expire()
        self._assign()

    def _arm(self) -> bool:
        """Whether any queue had to be armed."""
        fresh = [card for card in self._cards.values() if card.name not in self._armed]
        for card in fresh:
            card.completions.arm()
            self._armed.add(card.name)
        return bool(fresh)

    def _patience_ms(self) -> float | None:
        waiting = self._batches - self._expired
        if not waiting:
            return None
        return max(0.0, min(batch.deadline_s for batch in waiting) - time.monotonic()) * 1e3 + 1

    def _reap(self) -> bool:
        found = False
        for card in self._cards.values():
            while completions := self._completions_of(card):
                found = True
                for request_id, status, _ in completions:
                    path = self._by_serial.get(request_id // CHAINS)
                    ended = path.ended(request_id, status) if path is not None else None
                    if path is None or ended is None:
                        continue
                    if status:
                        own_card = not card.is_active()
                        self._break(path, [ended.run], status_name(status), own_card=own_card)
                    else:
                        card.sent_bytes += ended.run.size_bytes
                        self._through(ended.run)
        if found:
            self._assign()
        return found

    def _completions_of(self, card: Card) -> list[Completion]:
        try:
            return card.completions.poll()
        except RdmaUnavailable as error:
            for path in [path for path in self._pool if path.key.device == card.name]:
                self._break(path, [], str(error), own_card=True)
            return []

    # ---- runs

    def _assign(self) -> None:
        while run := self._spreader.assign(time.monotonic(), self._room, self._want):
            path = self._pool.use(run.path)
            assert path is not None
            try:
                path.start(run)
            except RdmaUnavailable as error:
                self._break(path, [], str(error), own_card=True)
        # Not before: to make one may cost another, which was perhaps about to be used.
        wanted, self._wanted = self._wanted, {}
        for key in wanted:
            self._make(key)

    def _room(self, key: EndpointKey) -> int:
        path = self._pool.get(key)
        return 0 if path is None else path.room()

    def _want(self, key: EndpointKey) -> None:
        self._wanted[key] = None

    def _make(self, key: EndpointKey) -> None:
        fits, victim = self._pool.reserve(key)
        if victim is not None:
            self._counters.evicted_endpoints += 1
            victim.close()
            self._forget(victim)
            self._connector.retire(victim, lambda result: None)
        if fits:
            self._connector.connect(key, lambda result: self._call(lambda: self._connected(key, result)))

    def _connected(self, key: EndpointKey, result: Path | KVError) -> None:
        if not isinstance(result, KVError):
            self._counters.made_endpoints += 1
            self._pool.add(result)
            if isinstance(result, RdmaPath):
                self._by_serial[result.serial] = result
            return
        self._pool.release(key)
        if self._is_closing:
            return
        logger.warning("no connection from %s to %s of %s: %s", key.device, key.peer_device, key.peer, result)
        if isinstance(result, Unreachable):
            self._lose_peer(key.peer, str(result))
            return
        card = self._cards.get(key.device)
        own_card = card is not None and not card.is_active()
        self._lose(self._spreader.refused(key, time.monotonic(), own_card=own_card), str(result))

    def _break(self, path: Path, ended: list[Run], reason: str, *, own_card: bool) -> None:
        """A path is of no use any more. Its slices go on elsewhere when its other end is gone, too: until
        then what was sent may still arrive, perhaps when the memory serves somebody else."""
        self._counters.failed_endpoints += 1
        device, peer_device = path.key.device, path.key.peer_device
        logger.warning("path %s to %s of %s: %s", device, peer_device, path.key.peer, reason)
        runs = [*ended, *path.close()]
        self._forget(path)

        def retired(result: KVError | None) -> None:
            now_s = time.monotonic()
            for run in runs:
                self._counters.retried_slices += len(run.slices)
                self._lose(self._spreader.failed(run, now_s, own_card=own_card), reason)
            if isinstance(result, Unreachable):
                self._lose_peer(path.key.peer, f"{reason}; {result}")
            self._drop_expired()

        self._connector.retire(path, lambda result: self._call(lambda: retired(result)))

    def _forget(self, path: Path) -> None:
        self._pool.remove(path.key)
        if isinstance(path, RdmaPath):
            self._by_serial.pop(path.serial, None)

    def _through(self, run: Run) -> None:
        self._spreader.done(run)
        for item in run.slices:
            progress = _progress_of(item)
            if progress.batch.moved(progress, item.size_bytes):
                self._finish(progress.batch)

    def _lose(self, slices: Sequence[Slice], reason: str, *, timed_out: bool = False) -> None:
        for item in slices:
            progress = _progress_of(item)
            if progress.batch.lost(progress, reason, timed_out=timed_out):
                self._finish(progress.batch)

    def _finish(self, batch: Batch) -> None:
        self._batches.discard(batch)
        self._expired.discard(batch)
        self._on_done(batch)

    # ---- ends

    def _lose_peer(self, peer: str, reason: str) -> None:
        """It does not answer on its control connection, and takes nothing on others then."""
        for path in [path for path in self._pool if path.key.peer == peer]:
            runs = path.close()
            self._forget(path)
            for run in runs:
                self._spreader.give_back(run)
        self._lose(
            self._spreader.drop(lambda item: _progress_of(item).request.segment.address == peer), reason
        )

    def _expire(self) -> None:
        """Batches whose time is over: they end when nothing touches their memory any more."""
        now_s = time.monotonic()
        late = {batch for batch in self._batches - self._expired if batch.deadline_s <= now_s}
        if not late:
            return
        self._expired |= late
        self._drop_expired()
        for path in list(self._pool):
            if any(_progress_of(item).batch in late for run in path.runs() for item in run.slices):
                self._take_back(path)

    def _take_back(self, path: Path) -> None:
        """Ends a path that did nothing wrong but carries what must not be carried any more."""
        runs = path.close()
        self._forget(path)

        def retired(result: KVError | None) -> None:
            for run in runs:
                self._spreader.give_back(run)
            if isinstance(result, Unreachable):
                self._lose_peer(path.key.peer, str(result))
            self._drop_expired()

        self._connector.retire(path, lambda result: self._call(lambda: retired(result)))

    def _drop_expired(self) -> None:
        if self._expired:
            dropped = self._spreader.drop(lambda item: _progress_of(item).batch in self._expired)
            self._lose(dropped, "its time was over", timed_out=True)

    def _shut_down(self) -> None:
        # First what is being made: it ends up in the inbox, and in the pool.
        self._connector.close()
        self._drain()
        for path in list(self._pool):
            for run in path.close():
                self._spreader.give_back(run)
            self._forget(path)
        # What was still to be retired comes back at once now.
        self._drain()
        self._lose(self._spreader.drop(lambda item: True), "the engine is closed")
        with self._wake_lock:
            self._is_closed = True
            os.close(self._wake_fd)
        self._drain()


def _progress_of(item: Slice) -> RequestProgress:
    progress = item.request
    assert isinstance(progress, RequestProgress)
    return progress
