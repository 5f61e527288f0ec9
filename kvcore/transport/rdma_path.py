"""One way to the store: a queue pair on a device here, connected with one on a device there, and the thread
that waits for its completions. When it fails it is made anew in the background.

The thread sleeps on descriptors; it costs nothing while nothing moves.
"""

import itertools
import logging
import os
import random
import select
import threading
import time
from collections import deque

from kvcore.transport.channel import Call, Channel
from kvcore.transport.parts import failure_of
from kvcore.transport.rdma_host import PROBE_BYTES, RdmaHost, keep_for_ever
from kvcore.transport.rdma_memory import Room
from kvcore.transport.rdma_mover import LOAD_PIECES, Load, Move, Mover
from kvcore.transport.verbs import (
    Chain,
    Completion,
    CompletionQueue,
    Opcode,
    Operation,
    PathOptions,
    QueuePair,
    RdmaUnavailable,
    status_name,
    wait_for_event,
)
from kvcore.wire.messages import (
    ConnectQueuePair,
    ConnectQueuePairReply,
    DisconnectQueuePair,
    ErrorReply,
    Status,
)

logger = logging.getLogger(__name__)

CHAINS = 4
MAX_REQUESTS = CHAINS * LOAD_PIECES
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
DISCONNECT_STALL_S = 2.0


class _Connected:
    """A queue pair in use, and what of the store it reaches."""

    def __init__(self, pair: QueuePair, queue: CompletionQueue, reply: ConnectQueuePairReply) -> None:
        self.pair = pair
        self.queue = queue
        self.peer = reply.address
        self.pool_address = reply.pool_address
        self.remote_key = reply.remote_key


class RdmaPath:
    """Implements mover.Path. `device_index`: of the host's devices. Thread-safe."""

    def __init__(
        self,
        mover: Mover,
        channel: Channel,
        host: RdmaHost,
        device_index: int,
        store_device: str,
        options: PathOptions,
    ) -> None:
        self.name = f"{host.devices[device_index].name} to {store_device}"
        self.queued_bytes = 0
        self.num_connects = 0
        self.last_error = ""
        self._mover = mover
        self._channel = channel
        self._host = host
        self._device_index = device_index
        self._store_device = store_device
        self._options = options
        self._lock = threading.Lock()
        # Held while a queue pair is being destroyed: who else wants that waits until it has happened.
        self._destroying = threading.Lock()
        self._live: _Connected | None = None
        self._chains: list[Chain] = []
        self._in_flight: dict[int, tuple[Chain, Load]] = {}
        self._waiting: deque[Load] = deque()
        self._numbers = itertools.count(1)
        self._unanswered: list[Call] = []  # the store may connect a queue pair when nobody waits any more
        self._probe_room: Room | None = None
        self._closing = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="mooncake-rdma-path", daemon=True)
        host.add_user(self)

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def open(self, timeout_s: float) -> None:
        """Connects, and then keeps connected. RdmaUnavailable when the first attempt fails."""
        try:
            self._connect(timeout_s)
        except RdmaUnavailable as error:
            self.last_error = str(error)
            raise
        finally:
            self._thread.start()

    def close(self) -> None:
        """Returns when no device touches anything for this path any more. Its thread ends soon after."""
        self._closing.set()
        self._break("closed")
        self._wake()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join()

    def leave_to_parent(self) -> None:
        """In a forked child, instead of `close`."""
        keep_for_ever(self)

    # ---- loads -----------------------------------------------------------------------------------------

    def enqueue(self, load: Load) -> bool:
        with self._lock:
            live = self._live
            if live is None:
                return False
            if not self._chains:
                self._waiting.append(load)
                self.queued_bytes += load.size_bytes
                return True
            operations = self._operations(live, load)
            if operations is None:
                return False
            error = self._post(live, load, operations)
        if error is not None:
            self._break(str(error))
        return error is None

    def withdraw(self, move: Move) -> None:
        with self._lock:
            dropped = [load for load in self._waiting if load.move is move]
            self._waiting = deque(load for load in self._waiting if load.move is not move)
            self.queued_bytes -= sum(load.size_bytes for load in dropped)
            is_in_flight = any(load.move is move for _, load in self._in_flight.values())
        self._mover.returned(self, dropped)
        if is_in_flight:
            self._break("a deadline passed")
        else:
            with self._destroying:
                pass

    def _operations(self, live: _Connected, load: Load) -> list[Operation] | None:
        """None: some of its memory is unknown to this path's device."""
        find, index, pool_address = self._host.memory.find, self._device_index, live.pool_address
        operations = []
        for local_address, size_bytes, pool_offset in load.pieces:
            entry = find(local_address, size_bytes)
            key = entry.keys[index] if entry is not None else None
            if key is None:
                return None
            operations.append(Operation(local_address, size_bytes, key, pool_address + pool_offset))
        return operations

    def _post(self, live: _Connected, load: Load, operations: list[Operation]) -> RdmaUnavailable | None:
        """With the lock held, and a chain to spare."""
        chain, number = self._chains.pop(), next(self._numbers)
        chain.fill(load.move.opcode, live.remote_key, operations, number)
        try:
            live.pair.post(chain)
        except RdmaUnavailable as error:
            self._chains.append(chain)
            return error
        self._in_flight[number] = chain, load
        self.queued_bytes += load.size_bytes
        return None

    def _completed(self, live: _Connected, found: list[Completion]) -> None:
        arrived: list[Load] = []
        with self._lock:
            if self._live is not live:
                return
            for number, status, _ in found:
                if status:
                    break
                chain, load = self._in_flight.pop(number)
                self._chains.append(chain)
                self.queued_bytes -= load.size_bytes
                arrived.append(load)
        failure = next((status for _, status, _ in found if status), 0)
        for load in arrived:
            self._mover.arrived(load)
        if failure:
            self._break(status_name(failure))
        else:
            self._post_waiting()

    def _post_waiting(self) -> None:
        while True:
            with self._lock:
                live = self._live
                if live is None or not self._waiting or not self._chains:
                    return
                load = self._waiting.popleft()
                self.queued_bytes -= load.size_bytes
                operations = self._operations(live, load)
                error = self._post(live, load, operations) if operations is not None else None
            if operations is None or error is not None:
                self._mover.returned(self, [load])
            if error is not None:
                self._break(str(error))

    # ---- life ------------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        """Destroys the queue pair; loads go elsewhere. The store hears of it before anybody says anything
        about the objects concerned: what is still on the wire must not arrive after that."""
        with self._destroying:
            with self._lock:
                live, self._live = self._live, None
                if live is None:
                    return
                self.last_error = reason
                lost = [load for _, load in self._in_flight.values()]
                self._chains += [chain for chain, _ in self._in_flight.values()]
                lost += self._waiting
                self._in_flight.clear()
                self._waiting.clear()
                self.queued_bytes = 0
            live.pair.close()
        if not self._closing.is_set():
            logger.warning("rdma path %s failed: %s", self.name, reason)
            self._disconnect(live.peer.number)
        self._wake()
        self._mover.returned(self, lost)

    def _connect(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        device = self._host.devices[self._device_index]
        if not self._host.binding.is_active(device.name):
            raise RdmaUnavailable(f"the port of {device.name} is down")
        queue = device.completion_queue(MAX_REQUESTS + 1)
        try:
            pair = device.queue_pair(queue, max_requests=MAX_REQUESTS)
            try:
                live = _Connected(pair, queue, self._ask(pair, deadline))
                self._finish_connecting(live, deadline)
            except RdmaUnavailable:
                pair.close()
                raise
        except RdmaUnavailable:
            queue.close()
            raise
        with self._lock:
            self._live = live
            self.num_connects += 1

    def _ask(self, pair: QueuePair, deadline: float) -> ConnectQueuePairReply:
        for late in self._unanswered:
            if isinstance(late.reply, ConnectQueuePairReply):
                self._disconnect(late.reply.address.number)
        self._unanswered = [late for late in self._unanswered if late.reply is None]
        fields = (self._store_device, pair.address)
        call = self._channel.start(ConnectQueuePair, fields, stall_s=max(0.0, deadline - time.monotonic()))
        outcome = self._channel.wait(call, deadline)
        if isinstance(outcome, ConnectQueuePairReply):
            return outcome
        if outcome is Status.TIMED_OUT:
            self._unanswered.append(call)
        if isinstance(outcome, ErrorReply):
            raise RdmaUnavailable(f"the store connects no queue pair: {outcome.message}")
        raise RdmaUnavailable(f"the store connects no queue pair: {failure_of(outcome).name}")

    def _finish_connecting(self, live: _Connected, deadline: float) -> None:
        try:
            live.pair.connect(live.peer, self._options)
            if not self._chains:
                self._chains = [live.pair.chain(LOAD_PIECES) for _ in range(CHAINS)]
            self._probe(live, deadline)
        except RdmaUnavailable:
            self._disconnect(live.peer.number)
            raise

    def _probe(self, live: _Connected, deadline: float) -> None:
        """Reads a few bytes: a queue pair says that it is connected even if the peer cannot be reached."""
        bounce = self._host.bounce()
        room = bounce.take(PROBE_BYTES) if bounce is not None else None
        if room is None:
            return
        self._probe_room = room  # until the next time: an answer may come after we have stopped waiting
        entry = self._host.memory.find(room.address, PROBE_BYTES)
        key = entry.keys[self._device_index] if entry is not None else None
        if key is None:
            return
        chain = self._chains[0]
        chain.fill(
            Opcode.READ, live.remote_key, [Operation(room.address, PROBE_BYTES, key, live.pool_address)], 0
        )
        live.queue.arm()
        live.pair.post(chain)
        if not wait_for_event(live.queue, deadline - time.monotonic()):
            raise RdmaUnavailable("a first read is not answered")
        if status := live.queue.poll()[0].status:
            raise RdmaUnavailable(f"a first read fails: {status_name(status)}")

    def _disconnect(self, number: int) -> None:
        """`number`: of the store's end."""
        fields = (self._store_device, number)
        call = self._channel.start(DisconnectQueuePair, fields, stall_s=DISCONNECT_STALL_S)
        if call.outcome is Status.TIMED_OUT:
            # The store must not hear anything else before this: then it hears that we are gone.
            self._channel.close()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            live = self._live
            if live is not None:
                self._serve(live)
                pause_s = FIRST_PAUSE_S
            # Many clients lose one switch at the same moment; they should not come back in step.
            if self._closing.wait(pause_s * random.uniform(0.7, 1.3)):
                break
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                self._connect(LONGEST_PAUSE_S)
            except (RdmaUnavailable, OSError) as error:
                self.last_error = str(error)
            else:
                logger.info("rdma path %s is there again", self.name)
        self._end()

    def _serve(self, live: _Connected) -> None:
        poller = select.poll()
        poller.register(live.queue.fd, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        try:
            while self._live is live:
                live.queue.arm()
                if found := live.queue.poll():
                    self._completed(live, found)
                    continue
                ready = [fd for fd, _ in poller.poll()]
                if live.queue.fd in ready:
                    live.queue.take_event()
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
        except RdmaUnavailable as error:
            self._break(str(error))
        finally:
            # Queue pairs go first, and somebody else may be at it.
            with self._destroying:
                live.queue.close()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _end(self) -> None:
        late = self._live
        if late is not None:  # connected while the path was being closed
            self._break("closed")
            late.queue.close()
        with self._lock:
            chains, self._chains = self._chains, []
            fd, self._wake_fd = self._wake_fd, -1
        for chain in chains:
            chain.close()
        os.close(fd)
        self._host.remove_user(self)
