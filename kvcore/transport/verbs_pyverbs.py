"""Verbs by rdma-core's pyverbs (44 and later).

Its calls never let other threads run, so none that waits is used. It frees a work request's memory only on
`close`, and copies the scatter entry at construction; by its own setter a request can be pointed at an entry
that stays ours, which makes requests reusable for other memory.
"""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR, DmaBufMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from kvcore.transport import verbs_sysfs
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
from kvcore.transport.verbs_common import (
    ACCESS_LOCAL,
    ACCESS_REMOTE,
    INLINE_BYTES,
    RECEIVED_WITH_IMMEDIATE,
    SEND_INLINE,
    SEND_SIGNALED,
    explain_registration,
    new_packet_number,
    port_of,
    set_nonblocking,
)

_RELIABLE_CONNECTION = 2
_channel_lock = threading.Lock()


class PyRegion:
    def __init__(self, region: Any, address: int, size_bytes: int) -> None:
        self._region = region
        self.address = address
        self.size_bytes = size_bytes
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        with contextlib.suppress(PyverbsError):  # a device that has vanished took it along
            self._region.close()


class PyCompletionQueue:
    def __init__(self, context: Any, capacity: int) -> None:
        self._channel, self.fd = _open_channel(context)
        set_nonblocking(self.fd)
        self.queue = CQ(context, capacity, None, self._channel, 0)

    def poll(self, max_completions: int = 64) -> list[Completion]:
        try:
            _, found = self.queue.poll(max_completions)
        except PyverbsError as error:
            raise RdmaUnavailable(f"the completion queue is broken: {error}") from error
        return [
            Completion(
                item.wr_id,
                item.status,
                item.imm_data if item.opcode == RECEIVED_WITH_IMMEDIATE and not item.status else None,
            )
            for item in found
        ]

    def arm(self) -> None:
        self.queue.req_notify(0)

    def take_event(self) -> None:
        try:
            self._channel.get_cq_event(self.queue)
        except PyverbsError:
            return
        self.queue.ack_events(1)

    def close(self) -> None:
        with contextlib.suppress(PyverbsError):
            self.queue.close()
            self._channel.close()


class PyChain:
    """The last requests are the ones in use, so that the tail is always the signalled one; links stay."""

    def __init__(self, capacity: int, max_inline_bytes: int) -> None:
        self.capacity = capacity
        self.head: Any = None
        self._max_inline_bytes = max_inline_bytes
        self._entries = [SGE(0, 0, 0) for _ in range(capacity)]
        self._requests: list[Any] = []
        following = None
        for entry in reversed(self._entries):
            request = SendWR(wr_id=0, opcode=0, num_sge=1, sg=[entry], send_flags=0, next_wr=following)
            request.close()  # its copy of the entry
            request.sg_list = entry
            self._requests.append(request)
            following = request
        self._requests.reverse()

    def fill(
        self,
        opcode: Opcode,
        remote_key: int,
        operations: Sequence[Operation],
        request_id: int,
        *,
        immediate: int = 0,
    ) -> None:
        first = self.capacity - len(operations)
        inline_bytes = self._max_inline_bytes if opcode != Opcode.READ else 0
        code = int(Opcode.READ if opcode == Opcode.READ else Opcode.WRITE)
        for position, (address, size_bytes, local_key, remote_address) in enumerate(operations, first):
            entry, request = self._entries[position], self._requests[position]
            entry.addr = address
            entry.length = size_bytes
            entry.lkey = local_key
            request.wr_id = request_id
            request.opcode = code
            request.send_flags = SEND_INLINE if size_bytes <= inline_bytes else 0
            request.set_wr_rdma(remote_key, remote_address)
        last = self._requests[-1]
        last.send_flags |= SEND_SIGNALED
        last.opcode = int(opcode)
        last.imm_data = immediate
        self.head = self._requests[first]

    def close(self) -> None:
        self.head = None
        self._requests.clear()
        while self._entries:
            self._entries.pop().close()


class PyQueuePair:
    def __init__(
        self, device: "PyDevice", queue: Any, max_requests: int, max_receives: int, remote_access: bool
    ) -> None:
        self.max_requests = max_requests
        self.max_inline_bytes = INLINE_BYTES
        self._device = device
        self._access = ACCESS_REMOTE if remote_access else ACCESS_LOCAL
        self._packet_number = new_packet_number()
        self._pair = device.create_pair(queue, max_requests, max_receives, INLINE_BYTES)
        self.number: int = self._pair.qp_num

    @property
    def address(self) -> QueuePairAddress:
        port = port_of(self._device.name)
        return QueuePairAddress(
            self.number, self._packet_number, port.gid.raw, port.lid, self._device.port().active_mtu
        )

    def chain(self, capacity: int) -> PyChain:
        return PyChain(min(capacity, self.max_requests), self.max_inline_bytes)

    def connect(self, peer: QueuePairAddress, options: PathOptions) -> None:
        port = port_of(self._device.name)
        route = GlobalRoute(
            dgid=GID(peer.gid.hex(":", 2)),
            sgid_index=port.gid.position,
            hop_limit=64,
            traffic_class=options.traffic_class,
        )
        is_global = int(port.is_ethernet or port.gid.raw[:8] != peer.gid[:8])
        attributes = QPAttr(port_num=verbs_sysfs.PORT)
        attributes.qp_access_flags = self._access
        attributes.dest_qp_num = peer.number
        attributes.path_mtu = min(self._device.port().active_mtu, peer.mtu)
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = self._device.max_reads
        attributes.min_rnr_timer = 12
        attributes.rq_psn, attributes.sq_psn = peer.packet_number, self._packet_number
        attributes.timeout = options.timeout_exponent
        attributes.retry_cnt = attributes.rnr_retry = options.retries
        try:
            attributes.ah_attr = AHAttr(
                gr=route, is_global=is_global, dlid=peer.lid, port_num=verbs_sysfs.PORT
            )
            self._pair.to_init(attributes)
            self._pair.to_rtr(attributes)
            self._pair.to_rts(attributes)
        except (PyverbsError, OverflowError) as error:
            raise RdmaUnavailable(f"{self._device.name} cannot connect a queue pair: {error}") from error

    def post(self, chain: Any) -> None:
        try:
            self._pair.post_send(chain.head)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{self._device.name} takes no requests: {error}") from error

    def post_receives(self, region: Region, count: int, request_id: int) -> None:
        entry = SGE(region.address, region.size_bytes, region.local_key)
        request = RecvWR(wr_id=request_id, num_sge=1, sg=[entry])
        try:
            for _ in range(count):
                self._pair.post_recv(request)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{self._device.name} takes no receives: {error}") from error
        finally:
            request.close()
            entry.close()

    def close(self) -> None:
        with contextlib.suppress(PyverbsError):  # a device that has vanished took it along
            self._pair.close()


class PyDevice:
    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._context = Context(name=name)
            self._domain = PD(self._context)
            attributes = self._context.query_device()
            self.max_message_bytes = min(self.port().max_msg_sz, 1 << 30)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{name} cannot be opened: {error}") from error
        self.max_reads = max(1, min(16, attributes.max_qp_rd_atom))

    def port(self) -> Any:
        return self._context.query_port(verbs_sysfs.PORT)

    def create_pair(self, queue: Any, max_requests: int, max_receives: int, inline_bytes: int) -> Any:
        room = QPCap(
            max_send_wr=max_requests,
            max_recv_wr=max_receives,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=inline_bytes,
        )
        wanted = QPInitAttr(qp_type=_RELIABLE_CONNECTION, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
        try:
            return QP(self._domain, wanted)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{self.name} has no room for a queue pair: {error}") from error

    def register(self, address: int, size_bytes: int, *, remote: bool) -> PyRegion:
        access = ACCESS_REMOTE if remote else ACCESS_LOCAL
        try:
            return PyRegion(MR(self._domain, size_bytes, access, address=address), address, size_bytes)
        except PyverbsError as error:
            raise RdmaUnavailable(explain_registration(self.name, size_bytes, error)) from error

    def register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool
    ) -> PyRegion:
        access = ACCESS_REMOTE if remote else ACCESS_LOCAL
        try:
            region = DmaBufMR(self._domain, size_bytes, access, dmabuf=fd, offset=offset)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{self.name} takes no dma-buf: {error}") from error
        # pyverbs names no address to the kernel: in operations the memory begins at its offset.
        return PyRegion(region, offset, size_bytes)

    def completion_queue(self, capacity: int) -> PyCompletionQueue:
        try:
            return PyCompletionQueue(self._context, capacity)
        except PyverbsError as error:
            raise RdmaUnavailable(f"{self.name} has no room for a completion queue: {error}") from error

    def queue_pair(
        self,
        completions: CompletionQueue,
        *,
        max_requests: int,
        max_receives: int = 1,
        remote_access: bool = False,
    ) -> PyQueuePair:
        assert isinstance(completions, PyCompletionQueue)
        return PyQueuePair(self, completions.queue, max_requests, max_receives, remote_access)

    def close(self) -> None:
        with contextlib.suppress(PyverbsError):
            self._domain.close()
            self._context.close()


class PyBinding:
    name = "pyverbs"

    def device_names(self) -> list[str]:
        try:
            return [device.name.decode() for device in get_device_list()]
        except PyverbsError as error:
            raise RdmaUnavailable(f"libibverbs lists no devices: {error}") from error

    def is_active(self, device_name: str) -> bool:
        return verbs_sysfs.is_active(device_name)

    def open(self, device_name: str) -> PyDevice:
        return PyDevice(device_name)


def _open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel with its descriptor, which older versions keep to themselves."""
    with _channel_lock:
        before = _event_descriptors()
        channel = CompChannel(context)
        fd = getattr(channel, "fd", None)
        return channel, fd if fd is not None else (_event_descriptors() - before).pop()


def _event_descriptors() -> set[int]:
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            if "infinibandevent" in str(path.readlink()):
                found.add(int(path.name))
        except OSError:
            continue
    return found


BINDING = PyBinding()
