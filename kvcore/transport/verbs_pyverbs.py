"""Verbs by rdma-core's pyverbs (44 and later).

Its calls never let other threads run, so none that waits is used. It frees a work request's memory only on
`close`, and copies the scatter entry at construction; by its own setter a request can be pointed at an entry
that stays ours, which makes requests reusable for other memory.
"""

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
from kvcore.transport.verbs import Opcode, Operation, PathOptions, QueuePairAddress, Region
from kvcore.transport.verbs_bound import (
    BoundBinding,
    BoundCompletionQueue,
    BoundDevice,
    BoundQueuePair,
)
from kvcore.transport.verbs_common import INLINE_BYTES, SEND_INLINE, SEND_SIGNALED

_RELIABLE_CONNECTION = 2
_channel_lock = threading.Lock()


class PyCompletionQueue(BoundCompletionQueue):
    refusal = PyverbsError

    def __init__(self, context: Any, capacity: int) -> None:
        channel, fd = _open_channel(context)
        super().__init__(channel, fd, CQ(context, capacity, None, channel, 0))

    def arm(self) -> None:
        self.queue.req_notify(0)

    def _poll(self, max_completions: int) -> list[Any]:
        found: list[Any] = self.queue.poll(max_completions)[1]
        return found

    def _take_event(self) -> None:
        self._channel.get_cq_event(self.queue)


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


class PyQueuePair(BoundQueuePair):
    def _chain(self, capacity: int) -> PyChain:
        return PyChain(capacity, self.max_inline_bytes)

    def _connect(
        self, peer: QueuePairAddress, options: PathOptions, gid_position: int, is_global: bool, mtu: int
    ) -> None:
        route = GlobalRoute(
            dgid=GID(peer.gid.hex(":", 2)),
            sgid_index=gid_position,
            hop_limit=64,
            traffic_class=options.traffic_class,
        )
        attributes = QPAttr(port_num=verbs_sysfs.PORT)
        attributes.qp_access_flags = self._access
        attributes.dest_qp_num = peer.number
        attributes.path_mtu = mtu
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = self._device.max_reads
        attributes.min_rnr_timer = 12
        attributes.rq_psn, attributes.sq_psn = peer.packet_number, self._packet_number
        attributes.timeout = options.timeout_exponent
        attributes.retry_cnt = attributes.rnr_retry = options.retries
        attributes.ah_attr = AHAttr(
            gr=route, is_global=int(is_global), dlid=peer.lid, port_num=verbs_sysfs.PORT
        )
        self._pair.to_init(attributes)
        self._pair.to_rtr(attributes)
        self._pair.to_rts(attributes)

    def _post(self, chain: Any) -> None:
        self._pair.post_send(chain.head)

    def _post_receives(self, region: Region, count: int, request_id: int) -> None:
        entry = SGE(region.address, region.size_bytes, region.local_key)
        request = RecvWR(wr_id=request_id, num_sge=1, sg=[entry])
        try:
            for _ in range(count):
                self._pair.post_recv(request)
        finally:
            request.close()
            entry.close()


class PyDevice(BoundDevice):
    refusal = PyverbsError

    def _open(self) -> Any:
        return Context(name=self.name)

    def _protection_domain(self) -> Any:
        return PD(self.context)

    def _register(self, address: int, size_bytes: int, access: int) -> Any:
        return MR(self.domain, size_bytes, access, address=address)

    def _register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, access: int
    ) -> tuple[Any, int]:
        # pyverbs names no address to the kernel: in operations the memory begins at its offset.
        return DmaBufMR(self.domain, size_bytes, access, dmabuf=fd, offset=offset), offset

    def _completion_queue(self, capacity: int) -> PyCompletionQueue:
        return PyCompletionQueue(self.context, capacity)

    def _queue_pair(self, queue: Any, max_requests: int, max_receives: int, access: int) -> PyQueuePair:
        room = QPCap(
            max_send_wr=max_requests,
            max_recv_wr=max_receives,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=INLINE_BYTES,
        )
        wanted = QPInitAttr(qp_type=_RELIABLE_CONNECTION, scq=queue, rcq=queue, cap=room, sq_sig_all=0)
        return PyQueuePair(self, QP(self.domain, wanted), max_requests, access)


class PyBinding(BoundBinding):
    name = "pyverbs"
    device_type = PyDevice

    def _device_names(self) -> list[str]:
        return [device.name.decode() for device in get_device_list()]


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
