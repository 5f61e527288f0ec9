"""The pool as RDMA devices see it: registered with each, and queue pairs that clients move its bytes by.

The store posts nothing and gets no completions: clients read and write by themselves. What is left is to know
who can, and to destroy a vanished client's queue pairs before anything it was writing to is used again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from kvcore.errors import RequestRefused
from kvcore.transport.verbs import (
    Binding,
    Device,
    PathOptions,
    QueuePair,
    RdmaUnavailable,
    choose_devices,
)
from kvcore.wire.messages import (
    ConnectQueuePair,
    ConnectQueuePairReply,
    DisconnectQueuePair,
    ErrorCode,
    ErrorReply,
    QueuePairAddress,
    RdmaOffer,
    Reply,
)
from store_server.core.objects import Session

logger = logging.getLogger(__name__)

R = TypeVar("R")
Connected = tuple[QueuePair, QueuePairAddress]

MAX_PAIRS_PER_CLIENT = 32
THREADS = 4


class _OpenDevice:
    """A device with the pool registered. The completion queue is there because verbs want one."""

    def __init__(self, device: Device, address: int, size_bytes: int) -> None:
        self.device = device
        try:
            self.region = device.register(address, size_bytes, remote=True)
        except RdmaUnavailable:
            device.close()
            raise
        self.completions = device.completion_queue(1)

    def close(self) -> None:
        self.completions.close()
        self.region.close()
        self.device.close()


class RdmaPoint:
    """Used in the loop's thread. `access_ended(session)` is called when a queue pair of it is destroyed."""

    def __init__(
        self,
        pool: memoryview,
        device_names: str,
        access_ended: Callable[[Session], None],
        load: Callable[[], Binding],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """RdmaUnavailable: there is no device, or none takes the pool. ConfigError: no device of that
        name."""
        memory = np.frombuffer(pool, np.uint8)
        self._pool_address: int = memory.ctypes.data
        self._pool_size_bytes = memory.nbytes
        self._access_ended = access_ended
        self._loop = loop
        self._threads = ThreadPoolExecutor(THREADS, "rdma-pairs")
        self._making: set[Future[Connected]] = set()
        self._connecting: dict[int, int] = {}  # by session; without an entry the session has ended
        self._devices: dict[str, _OpenDevice] = {}
        self._pairs: dict[int, dict[tuple[str, int], QueuePair]] = {}
        binding = load()
        reasons = []
        for name in choose_devices(binding, device_names):
            try:
                self._devices[name] = _OpenDevice(
                    binding.open(name), self._pool_address, self._pool_size_bytes
                )
            except RdmaUnavailable as error:
                reasons.append(str(error))
                logger.warning("the pool is not offered on %s: %s", name, error)
        if not self._devices:
            raise RdmaUnavailable("; ".join(reasons))
        self.binding_name = binding.name

    @property
    def num_pairs(self) -> int:
        return sum(map(len, self._pairs.values()))

    @property
    def offer(self) -> RdmaOffer:
        return RdmaOffer(list(self._devices), self._pool_size_bytes)

    def connect(self, session: Session, request: ConnectQueuePair, answer: Callable[[Reply], None]) -> None:
        """Answers later, from the loop: connecting resolves the peer's address, which can take seconds when
        the peer is not there. RequestRefused at once for what cannot be."""
        opened = self._devices.get(request.device)
        if opened is None:
            raise RequestRefused(ErrorCode.BAD_REQUEST, f"the pool is not on a device {request.device!r}")
        own = self._pairs.setdefault(session.number, {})
        connecting = self._connecting.get(session.number, 0)
        if len(own) + connecting >= MAX_PAIRS_PER_CLIENT:
            raise RequestRefused(
                ErrorCode.OVER_LIMIT, f"a client may have {MAX_PAIRS_PER_CLIENT} queue pairs"
            )
        self._connecting[session.number] = connecting + 1

        def connected(making: "Future[Connected]") -> None:
            self._making.discard(making)
            still_here = self._connecting.pop(session.number, 0) - 1
            if still_here > 0:
                self._connecting[session.number] = still_here
            error = making.exception()
            if error is not None:
                answer(ErrorReply(request.id, ErrorCode.NOT_READY, str(error), retryable=True))
                return
            pair, address = making.result()
            if still_here < 0:
                pair.close()
                return
            own[request.device, pair.number] = pair
            session.num_queue_pairs += 1
            region = opened.region
            answer(ConnectQueuePairReply(request.id, address, region.address, region.remote_key))

        self._making.add(self._in_thread(partial(_connected_pair, opened, request.address), connected))

    def disconnect(self, session: Session, request: DisconnectQueuePair) -> None:
        """One that is not there (any more) is no error: the client only wants to be sure."""
        pair = self._pairs.get(session.number, {}).pop((request.device, request.number), None)
        if pair is not None:
            # Here and now: what the client says next may be about what it was writing by this queue pair.
            pair.close()
            self._destroyed(session)

    def withdraw(self, session: Session) -> None:
        """Its connection has ended; a queue pair that is being connected will find nobody."""
        self._connecting.pop(session.number, None)
        for pair in self._pairs.pop(session.number, {}).values():
            # In a thread: soft-RoCE waits for its packets, up to two seconds. The quarantine lasts as long.
            self._in_thread(pair.close, partial(self._destroyed, session))

    def close(self) -> None:
        """When all connections have ended."""
        self._threads.shutdown()
        for making in self._making:
            if making.exception() is None:
                making.result()[0].close()
        self._making.clear()
        for own in self._pairs.values():
            for pair in own.values():
                pair.close()
        self._pairs.clear()
        for opened in self._devices.values():
            opened.close()
        self._devices.clear()

    def _in_thread(self, action: Callable[[], R], then: "Callable[[Future[R]], None]") -> "Future[R]":
        """`then` is called in the loop, if that is still there."""

        def tell_loop(done: "Future[R]") -> None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(then, done)

        done = self._threads.submit(action)
        done.add_done_callback(tell_loop)
        return done

    def _destroyed(self, session: Session, done: "Future[None] | None" = None) -> None:
        session.num_queue_pairs -= 1
        self._access_ended(session)


def _connected_pair(opened: _OpenDevice, peer: QueuePairAddress) -> Connected:
    """In a thread. RdmaUnavailable when the device cannot."""
    pair = opened.device.queue_pair(opened.completions, max_requests=1, remote_access=True)
    try:
        pair.connect(peer, PathOptions())
        return pair, pair.address
    except RdmaUnavailable:
        pair.close()
        raise
