"""What the verbs bindings do alike (kvcore/transport/verbs.py says what it means): errors of their library
become RdmaUnavailable, and what a device that has vanished took along closes all the same.

A binding derives from these classes and adds the calls of its library, in methods that begin with "_".
"""

import contextlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from kvcore.transport import verbs_sysfs
from kvcore.transport.verbs import (
    Chain,
    Completion,
    CompletionQueue,
    Device,
    PathOptions,
    QueuePair,
    QueuePairAddress,
    RdmaUnavailable,
    Region,
)
from kvcore.transport.verbs_common import (
    ACCESS_LOCAL,
    ACCESS_REMOTE,
    INLINE_BYTES,
    RECEIVED_WITH_IMMEDIATE,
    explain_registration,
    new_packet_number,
    port_of,
    set_nonblocking,
)

MOST_READS = 16
MAX_MESSAGE_BYTES = 1 << 30
Refusal = type[Exception]


class BoundRegion:
    def __init__(self, region: Any, address: int, size_bytes: int, refusal: Refusal) -> None:
        self._region = region
        self._refusal = refusal
        self.address = address
        self.size_bytes = size_bytes
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        with contextlib.suppress(self._refusal):
            self._region.close()


class BoundCompletionQueue(ABC):
    refusal: ClassVar[Refusal]

    def __init__(self, channel: Any, fd: int, queue: Any) -> None:
        self.fd = fd
        self.queue = queue
        self._channel = channel
        set_nonblocking(fd)

    def poll(self, max_completions: int = 64) -> list[Completion]:
        try:
            found = self._poll(max_completions)
        except self.refusal as error:
            raise RdmaUnavailable(f"the completion queue is broken: {error}") from error
        return [
            Completion(
                item.wr_id,
                item.status,
                item.imm_data if item.opcode == RECEIVED_WITH_IMMEDIATE and not item.status else None,
            )
            for item in found
        ]

    @abstractmethod
    def arm(self) -> None: ...

    def take_event(self) -> None:
        try:
            self._take_event()
        except self.refusal:
            return
        self.queue.ack_events(1)

    def close(self) -> None:
        with contextlib.suppress(self.refusal):
            self.queue.close()
            self._channel.close()

    @abstractmethod
    def _poll(self, max_completions: int) -> list[Any]: ...

    @abstractmethod
    def _take_event(self) -> None:
        """Fails at once when there is none."""


class BoundQueuePair(ABC):
    def __init__(self, device: "BoundDevice", pair: Any, max_requests: int, access: int) -> None:
        self.max_requests = max_requests
        self.max_inline_bytes = INLINE_BYTES
        self.number: int = pair.qp_num
        self._device = device
        self._pair = pair
        self._access = access
        self._packet_number = new_packet_number()

    @property
    def address(self) -> QueuePairAddress:
        port = port_of(self._device.name)
        return QueuePairAddress(
            self.number, self._packet_number, port.gid.raw, port.lid, int(self._device.port().active_mtu)
        )

    def chain(self, capacity: int) -> Chain:
        return self._chain(min(capacity, self.max_requests))

    def connect(self, peer: QueuePairAddress, options: PathOptions) -> None:
        port = port_of(self._device.name)
        is_global = port.is_ethernet or port.gid.raw[:8] != peer.gid[:8]
        mtu = min(int(self._device.port().active_mtu), peer.mtu)
        try:
            self._connect(peer, options, port.gid.position, is_global, mtu)
        except (self._device.refusal, ValueError, OverflowError) as error:
            raise RdmaUnavailable(f"{self._device.name} cannot connect a queue pair: {error}") from error

    def post(self, chain: Any) -> None:
        try:
            self._post(chain)
        except self._device.refusal as error:
            raise RdmaUnavailable(f"{self._device.name} takes no requests: {error}") from error

    def post_receives(self, region: Region, count: int, request_id: int) -> None:
        try:
            self._post_receives(region, count, request_id)
        except self._device.refusal as error:
            raise RdmaUnavailable(f"{self._device.name} takes no receives: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(self._device.refusal):
            self._pair.close()

    @abstractmethod
    def _chain(self, capacity: int) -> Chain: ...

    @abstractmethod
    def _connect(
        self, peer: QueuePairAddress, options: PathOptions, gid_position: int, is_global: bool, mtu: int
    ) -> None: ...

    @abstractmethod
    def _post(self, chain: Any) -> None: ...

    @abstractmethod
    def _post_receives(self, region: Region, count: int, request_id: int) -> None: ...


class BoundDevice(ABC):
    refusal: ClassVar[Refusal]

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self.context = self._open()
            self.domain = self._protection_domain()
            attributes = self.context.query_device()
            self.max_message_bytes = min(self.port().max_msg_sz, MAX_MESSAGE_BYTES)
        except self.refusal as error:
            raise RdmaUnavailable(f"{name} cannot be opened: {error}") from error
        self.max_reads: int = max(1, min(MOST_READS, attributes.max_qp_rd_atom))

    def port(self) -> Any:
        return self.context.query_port(verbs_sysfs.PORT)

    def register(self, address: int, size_bytes: int, *, remote: bool) -> Region:
        try:
            region = self._register(address, size_bytes, _access(remote))
        except self.refusal as error:
            raise RdmaUnavailable(explain_registration(self.name, size_bytes, error)) from error
        return BoundRegion(region, address, size_bytes, self.refusal)

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool) -> Region:
        try:
            region, begin = self._register_dmabuf(fd, offset, size_bytes, address, _access(remote))
        except self.refusal as error:
            raise RdmaUnavailable(f"{self.name} takes no dma-buf: {error}") from error
        return BoundRegion(region, begin, size_bytes, self.refusal)

    def completion_queue(self, capacity: int) -> CompletionQueue:
        try:
            return self._completion_queue(capacity)
        except self.refusal as error:
            raise RdmaUnavailable(f"{self.name} has no room for a completion queue: {error}") from error

    def queue_pair(
        self,
        completions: CompletionQueue,
        *,
        max_requests: int,
        max_receives: int = 1,
        remote_access: bool = False,
    ) -> QueuePair:
        assert isinstance(completions, BoundCompletionQueue)
        try:
            return self._queue_pair(completions.queue, max_requests, max_receives, _access(remote_access))
        except self.refusal as error:
            raise RdmaUnavailable(f"{self.name} has no room for a queue pair: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(self.refusal):
            self.domain.close()
            self.context.close()

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _protection_domain(self) -> Any: ...

    @abstractmethod
    def _register(self, address: int, size_bytes: int, access: int) -> Any: ...

    @abstractmethod
    def _register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, access: int
    ) -> tuple[Any, int]:
        """The registration, and where the memory begins in operations."""

    @abstractmethod
    def _completion_queue(self, capacity: int) -> CompletionQueue: ...

    @abstractmethod
    def _queue_pair(self, queue: Any, max_requests: int, max_receives: int, access: int) -> QueuePair: ...


class BoundBinding(ABC):
    name: str
    device_type: ClassVar[type[BoundDevice]]

    def device_names(self) -> list[str]:
        try:
            return self._device_names()
        except self.device_type.refusal as error:
            raise RdmaUnavailable(f"libibverbs lists no devices: {error}") from error

    def is_active(self, device_name: str) -> bool:
        return verbs_sysfs.is_active(device_name)

    def open(self, device_name: str) -> Device:
        return self.device_type(device_name)

    @abstractmethod
    def _device_names(self) -> list[str]: ...


def _access(remote: bool) -> int:
    return ACCESS_REMOTE if remote else ACCESS_LOCAL
