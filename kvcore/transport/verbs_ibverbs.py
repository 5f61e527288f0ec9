"""Verbs by the `ibverbs` wheel (2026.10): every call of it lets other threads run."""

from collections.abc import Sequence
from typing import Any

import ibverbs as ib

from kvcore.transport import verbs_sysfs
from kvcore.transport.verbs import (
    Opcode,
    Operation,
    PathOptions,
    QueuePairAddress,
    RdmaUnavailable,
    Region,
)
from kvcore.transport.verbs_bound import (
    BoundBinding,
    BoundCompletionQueue,
    BoundDevice,
    BoundQueuePair,
)
from kvcore.transport.verbs_common import INLINE_BYTES, SEND_INLINE, SEND_SIGNALED


class IbCompletionQueue(BoundCompletionQueue):
    refusal = OSError

    def __init__(self, context: Any, capacity: int) -> None:
        channel = context.create_comp_channel()
        super().__init__(channel, channel.fd, context.create_cq(capacity, channel))

    def arm(self) -> None:
        self.queue.req_notify()

    def _poll(self, max_completions: int) -> list[Any]:
        found: list[Any] = self.queue.poll(max_completions)
        return found

    def _take_event(self) -> None:
        self._channel.get_cq_event()


class IbChain:
    """The last requests of the list are the ones in use, so that its tail is always the signalled one."""

    def __init__(self, capacity: int, max_inline_bytes: int) -> None:
        self.capacity = capacity
        self.requests: list[Any] = [ib.SendWR(wr_id=0, sg_list=[], opcode=0) for _ in range(capacity)]
        self.ready: list[Any] = []
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
        self.ready = self.requests[self.capacity - len(operations) :]
        inline_bytes = self._max_inline_bytes if opcode != Opcode.READ else 0
        code = int(Opcode.READ if opcode == Opcode.READ else Opcode.WRITE)
        sge = ib.SGE
        for request, (address, size_bytes, local_key, remote_address) in zip(
            self.ready, operations, strict=True
        ):
            request.wr_id = request_id
            request.opcode = code
            request.send_flags = SEND_INLINE if size_bytes <= inline_bytes else 0
            request.sg_list = [sge(address, size_bytes, lkey=local_key)]
            request.remote_addr = remote_address
            request.rkey = remote_key
        last = self.ready[-1]
        last.send_flags |= SEND_SIGNALED
        last.opcode = int(opcode)
        last.imm_data = immediate

    def close(self) -> None:
        self.requests.clear()
        self.ready.clear()


class IbQueuePair(BoundQueuePair):
    def _chain(self, capacity: int) -> IbChain:
        return IbChain(capacity, self.max_inline_bytes)

    def _connect(
        self, peer: QueuePairAddress, options: PathOptions, gid_position: int, is_global: bool, mtu: int
    ) -> None:
        path = ib.AHAttr(
            is_global=int(is_global),
            dgid=peer.gid,
            sgid_index=gid_position,
            hop_limit=64,
            traffic_class=options.traffic_class,
            dlid=peer.lid,
            port_num=verbs_sysfs.PORT,
        )
        mask = ib.QPAttrMask
        self._pair.to_init(verbs_sysfs.PORT, self._access)
        self._pair.modify(
            mask.STATE | mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN | mask.MAX_DEST_RD_ATOMIC
            | mask.MIN_RNR_TIMER,
            ah_attr=path,
            qp_state=int(ib.QPState.RTR),
            path_mtu=mtu,
            dest_qp_num=peer.number,
            rq_psn=peer.packet_number,
            max_dest_rd_atomic=self._device.max_reads,
            min_rnr_timer=12,
        )  # fmt: skip
        self._pair.to_rts(
            self._packet_number,
            timeout=options.timeout_exponent,
            retry_cnt=options.retries,
            rnr_retry=options.retries,
            max_rd_atomic=self._device.max_reads,
        )

    def _post(self, chain: Any) -> None:
        self._pair.post_send(chain.ready)

    def _post_receives(self, region: Region, count: int, request_id: int) -> None:
        entry = ib.SGE(region.address, region.size_bytes, lkey=region.local_key)
        self._pair.post_recv([ib.RecvWR(wr_id=request_id, sg_list=[entry]) for _ in range(count)])


class IbDevice(BoundDevice):
    refusal = OSError

    def _open(self) -> Any:
        found = {device.name: device for device in ib.get_device_list()}
        if self.name not in found:
            raise RdmaUnavailable(f"libibverbs knows no device {self.name}")
        return found[self.name].open()

    def _protection_domain(self) -> Any:
        return self.context.alloc_pd()

    def _register(self, address: int, size_bytes: int, access: int) -> Any:
        return self.domain.reg_mr(address, size_bytes, access)

    def _register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, access: int
    ) -> tuple[Any, int]:
        return self.domain.reg_dmabuf_mr(offset, size_bytes, address, fd, access), address

    def _completion_queue(self, capacity: int) -> IbCompletionQueue:
        return IbCompletionQueue(self.context, capacity)

    def _queue_pair(self, queue: Any, max_requests: int, max_receives: int, access: int) -> IbQueuePair:
        pair = self.domain.create_qp(
            ib.QPInitAttr(
                send_cq=queue,
                recv_cq=queue,
                qp_type=ib.QPType.RC,
                max_send_wr=max_requests,
                max_recv_wr=max_receives,
                max_send_sge=1,
                max_recv_sge=1,
                max_inline_data=INLINE_BYTES,
            )
        )
        return IbQueuePair(self, pair, max_requests, access)


class IbBinding(BoundBinding):
    name = "ibverbs"
    device_type = IbDevice

    def _device_names(self) -> list[str]:
        return [device.name for device in ib.get_device_list()]


BINDING = IbBinding()
