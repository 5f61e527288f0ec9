"""A third verbs binding: devices and a wire inside one process, for tests without an RDMA device.

Requests are carried out when they are posted, by copying memory, with the checks a card makes: keys, bounds,
permissions, order after an error. `FakeFabric.hold` keeps them on the wire, `FakeDevice.active` unplugs a
cable.
"""

import ctypes
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence

from kvcore.transport.verbs import (
    Completion,
    CompletionQueue,
    Opcode,
    Operation,
    PathOptions,
    QueuePairAddress,
    RdmaUnavailable,
    Region,
)

LOCAL_ERROR, FLUSHED, ACCESS_REFUSED, NO_ANSWER = 2, 5, 10, 12


class FakeRegion:
    def __init__(self, device: "FakeDevice", address: int, size_bytes: int, remote: bool) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.is_remote = remote
        self.local_key = self.remote_key = next(device.fabric.numbers)
        self._device = device
        device.regions[self.local_key] = self

    def close(self) -> None:
        with self._device.fabric.lock:
            self._device.regions.pop(self.local_key, None)


class FakeCompletionQueue:
    def __init__(self, fabric: "FakeFabric") -> None:
        self.fd, self._writing_end = os.pipe()
        os.set_blocking(self.fd, False)
        self._lock = fabric.lock
        self._completions: deque[Completion] = deque()
        self._is_armed = False
        self._is_open = True

    def add(self, completion: Completion) -> None:
        if not self._is_open:
            return
        self._completions.append(completion)
        if self._is_armed:
            self._is_armed = False
            os.write(self._writing_end, b"!")

    def poll(self, max_completions: int = 64) -> list[Completion]:
        with self._lock:
            count = min(max_completions, len(self._completions))
            return [self._completions.popleft() for _ in range(count)]

    def arm(self) -> None:
        with self._lock:
            self._is_armed = True

    def take_event(self) -> None:
        try:
            os.read(self.fd, 1)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self.fd)
                os.close(self._writing_end)


class FakeChain:
    def __init__(self, capacity: int, max_inline_bytes: int) -> None:
        self.capacity = capacity
        self.content: tuple[Opcode, int, list[Operation], int, int] | None = None
        self._max_inline_bytes = max_inline_bytes

    def fill(
        self,
        opcode: Opcode,
        remote_key: int,
        operations: Sequence[Operation],
        request_id: int,
        *,
        immediate: int = 0,
    ) -> None:
        if not 1 <= len(operations) <= self.capacity:
            raise ValueError(f"{len(operations)} operations for a chain of {self.capacity}")
        self.content = (opcode, remote_key, list(operations), request_id, immediate)

    def inlines(self, opcode: Opcode, operation: Operation) -> bool:
        return opcode != Opcode.READ and operation.size_bytes <= self._max_inline_bytes

    def close(self) -> None:
        self.content = None


class FakeQueuePair:
    def __init__(
        self, device: "FakeDevice", queue: FakeCompletionQueue, max_requests: int, remote: bool
    ) -> None:
        self.number = next(device.fabric.numbers)
        self.max_requests = max_requests
        self.max_inline_bytes = 64
        self.device = device
        self.queue = queue
        self.receives: deque[int] = deque()
        self.serves_peer = remote
        self.peer: tuple[str, int] | None = None
        self.is_broken = False
        self._fabric = device.fabric
        device.pairs[self.number] = self

    @property
    def address(self) -> QueuePairAddress:
        return QueuePairAddress(self.number, 0, self.device.name.encode().ljust(16, b"\0"), 0, 5)

    def chain(self, capacity: int) -> FakeChain:
        return FakeChain(min(capacity, self.max_requests), self.max_inline_bytes)

    def connect(self, peer: QueuePairAddress, options: PathOptions) -> None:
        self.peer = (peer.gid.rstrip(b"\0").decode(), peer.number)

    def post(self, chain: FakeChain) -> None:
        assert chain.content is not None, "a chain is filled before it is posted"
        with self._fabric.lock:
            if self.peer is None or self.number not in self.device.pairs:
                raise RdmaUnavailable(f"{self.device.name} takes no requests: not connected")
            self._fabric.carry(self, chain)

    def post_receives(self, region: Region, count: int, request_id: int) -> None:
        with self._fabric.lock:
            self.receives.extend([request_id] * count)

    def close(self) -> None:
        with self._fabric.lock:
            self.device.pairs.pop(self.number, None)


Held = tuple[FakeQueuePair, FakeChain]


class FakeDevice:
    """Set `active` to False to pull its cable. `is_full`: it refuses to register memory."""

    max_message_bytes = 1 << 20

    def __init__(self, fabric: "FakeFabric", name: str) -> None:
        self.name = name
        self.fabric = fabric
        self.active = True
        self.is_full = False
        self.regions: dict[int, FakeRegion] = {}
        self.pairs: dict[int, FakeQueuePair] = {}

    def register(self, address: int, size_bytes: int, *, remote: bool) -> FakeRegion:
        if self.is_full:
            raise RdmaUnavailable(f"{self.name} cannot register {size_bytes} bytes")
        with self.fabric.lock:
            return FakeRegion(self, address, size_bytes, remote)

    def register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool
    ) -> FakeRegion:
        raise RdmaUnavailable(f"{self.name} takes no dma-buf")

    def completion_queue(self, capacity: int) -> FakeCompletionQueue:
        return FakeCompletionQueue(self.fabric)

    def queue_pair(
        self,
        completions: CompletionQueue,
        *,
        max_requests: int,
        max_receives: int = 1,
        remote_access: bool = False,
    ) -> FakeQueuePair:
        assert isinstance(completions, FakeCompletionQueue)
        with self.fabric.lock:
            return FakeQueuePair(self, completions, max_requests, remote_access)

    def close(self) -> None:
        """Others may have it open, too: it lives as long as its fabric."""

    def allows(self, key: int, address: int, size_bytes: int, *, from_peer: bool) -> bool:
        region = self.regions.get(key)
        return (
            region is not None
            and (region.is_remote or not from_peer)
            and region.address <= address
            and address + size_bytes <= region.address + region.size_bytes
        )


class FakeFabric:
    """A Binding whose devices all see each other. Thread-safe."""

    name = "fake"

    def __init__(self, *device_names: str) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count(100)
        self.devices = {name: FakeDevice(self, name) for name in device_names}
        self._held: deque[Held] | None = None

    def device_names(self) -> list[str]:
        return list(self.devices)

    def is_active(self, device_name: str) -> bool:
        return self.devices[device_name].active

    def open(self, device_name: str) -> FakeDevice:
        if device_name not in self.devices:
            raise RdmaUnavailable(f"no device {device_name}")
        return self.devices[device_name]

    def hold(self) -> None:
        """What is posted from now on stays on the wire until `deliver`."""
        with self.lock:
            self._held = self._held or deque()

    def deliver(self) -> None:
        with self.lock:
            held, self._held = self._held or deque(), None
            for chain in held:
                self.execute(chain)

    def take_held(self) -> list[Held]:
        """What is on the wire, to be carried out by `execute` in any order, or never."""
        with self.lock:
            held = list(self._held or ())
            if self._held is not None:
                self._held.clear()
            return held

    def execute(self, held: Held) -> None:
        with self.lock:
            self._execute(*held)

    # With the lock held.

    def carry(self, pair: FakeQueuePair, chain: FakeChain) -> None:
        if self._held is not None:
            self._held.append((pair, chain))
        else:
            self._execute(pair, chain)

    def _execute(self, pair: FakeQueuePair, chain: FakeChain) -> None:
        if chain.content is None:
            return
        opcode, remote_key, operations, request_id, immediate = chain.content
        for position, operation in enumerate(operations):
            status = self._try_one(pair, chain, opcode, remote_key, operation)
            if status:
                pair.is_broken = True
                pair.queue.add(Completion(request_id, status))
            elif position == len(operations) - 1:
                self._notify(pair, opcode, immediate)
                pair.queue.add(Completion(request_id, 0))

    def _try_one(
        self, pair: FakeQueuePair, chain: FakeChain, opcode: Opcode, remote_key: int, operation: Operation
    ) -> int:
        if pair.is_broken:
            return FLUSHED
        local, size_bytes, local_key, remote = operation
        mine = pair.device
        if pair.number not in mine.pairs:
            return FLUSHED
        if not mine.active:
            return LOCAL_ERROR
        if not chain.inlines(opcode, operation) and not mine.allows(
            local_key, local, size_bytes, from_peer=False
        ):
            return LOCAL_ERROR
        other = self._peer_of(pair)
        if other is None or other.is_broken or not other.device.active:
            return NO_ANSWER
        if not other.serves_peer or not other.device.allows(remote_key, remote, size_bytes, from_peer=True):
            other.is_broken = True
            return ACCESS_REFUSED
        target, source = (local, remote) if opcode == Opcode.READ else (remote, local)
        ctypes.memmove(target, source, size_bytes)
        return 0

    def _notify(self, pair: FakeQueuePair, opcode: Opcode, immediate: int) -> None:
        other = self._peer_of(pair)
        if opcode == Opcode.WRITE_WITH_IMMEDIATE and other is not None and other.receives:
            other.queue.add(Completion(other.receives.popleft(), 0, immediate))

    def _peer_of(self, pair: FakeQueuePair) -> FakeQueuePair | None:
        if pair.peer is None:
            return None
        device_name, number = pair.peer
        device = self.devices.get(device_name)
        return device.pairs.get(number) if device is not None else None
