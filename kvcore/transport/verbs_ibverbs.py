"""Verbs by the `ibverbs` wheel (2026.10): every call of it lets other threads run."""

import contextlib
from collections.abc import Sequence
from typing import Any

import ibverbs as ib

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


class IbRegion:
    def __init__(self, region: Any, address: int, size_bytes: int) -> None:
        self._region = region
        self.address = address
        self.size_bytes = size_bytes
        self.local_key: int = region.lkey
        self.remote_key: int = region.rkey

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a device that has vanished took it along
            self._region.close()


class IbCompletionQueue:
    def __init__(self, context: Any, capacity: int) -> None:
        self._channel = context.create_comp_channel()
        self.fd: int = self._channel.fd
        set_nonblocking(self.fd)
        self.queue = context.create_cq(capacity, self._channel)

    def poll(self, max_completions: int = 64) -> list[Completion]:
        try:
            found = self.queue.poll(max_completions)
        except OSError as error:
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
        self.queue.req_notify()

    def take_event(self) -> None:
        try:
            self._channel.get_cq_event()
        except OSError:
            return
        self.queue.ack_events(1)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.queue.close()
            self._channel.close()


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


class IbQueuePair:
    def __init__(
        self, device: "IbDevice", queue: Any, max_requests: int, max_receives: int, remote_access: bool
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
            self.number, self._packet_number, port.gid.raw, port.lid, int(self._device.port().active_mtu)
        )

    def chain(self, capacity: int) -> IbChain:
        return IbChain(min(capacity, self.max_requests), self.max_inline_bytes)

    def connect(self, peer: QueuePairAddress, options: PathOptions) -> None:
        port = port_of(self._device.name)
        local_mtu = int(self._device.port().active_mtu)
        path = ib.AHAttr(
            is_global=int(port.is_ethernet or port.gid.raw[:8] != peer.gid[:8]),
            dgid=peer.gid,
            sgid_index=port.gid.position,
            hop_limit=64,
            traffic_class=options.traffic_class,
            dlid=peer.lid,
            port_num=verbs_sysfs.PORT,
        )
        mask = ib.QPAttrMask
        try:
            self._pair.to_init(verbs_sysfs.PORT, self._access)
            self._pair.modify(
                mask.STATE | mask.AV | mask.PATH_MTU | mask.DEST_QPN | mask.RQ_PSN | mask.MAX_DEST_RD_ATOMIC
                | mask.MIN_RNR_TIMER,
                ah_attr=path,
                qp_state=int(ib.QPState.RTR),
                path_mtu=min(local_mtu, peer.mtu),
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
        except (OSError, ValueError, OverflowError) as error:
            raise RdmaUnavailable(f"{self._device.name} cannot connect a queue pair: {error}") from error

    def post(self, chain: Any) -> None:
        try:
            self._pair.post_send(chain.ready)
        except OSError as error:
            raise RdmaUnavailable(f"{self._device.name} takes no requests: {error}") from error

    def post_receives(self, region: Region, count: int, request_id: int) -> None:
        entry = ib.SGE(region.address, region.size_bytes, lkey=region.local_key)
        try:
            self._pair.post_recv([ib.RecvWR(wr_id=request_id, sg_list=[entry]) for _ in range(count)])
        except OSError as error:
            raise RdmaUnavailable(f"{self._device.name} takes no receives: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a device that has vanished took it along
            self._pair.close()


class IbDevice:
    def __init__(self, name: str) -> None:
        self.name = name
        try:
            found = {device.name: device for device in ib.get_device_list()}
            self._context = found[name].open()
            self._domain = self._context.alloc_pd()
            attributes = self._context.query_device()
            self.max_message_bytes = min(self.port().max_msg_sz, 1 << 30)
        except KeyError:
            raise RdmaUnavailable(f"libibverbs knows no device {name}") from None
        except OSError as error:
            raise RdmaUnavailable(f"{name} cannot be opened: {error}") from error
        self.max_reads = max(1, min(16, attributes.max_qp_rd_atom))

    def port(self) -> Any:
        return self._context.query_port(verbs_sysfs.PORT)

    def create_pair(self, queue: Any, max_requests: int, max_receives: int, inline_bytes: int) -> Any:
        try:
            return self._domain.create_qp(
                ib.QPInitAttr(
                    send_cq=queue,
                    recv_cq=queue,
                    qp_type=ib.QPType.RC,
                    max_send_wr=max_requests,
                    max_recv_wr=max_receives,
                    max_send_sge=1,
                    max_recv_sge=1,
                    max_inline_data=inline_bytes,
                )
            )
        except OSError as error:
            raise RdmaUnavailable(f"{self.name} has no room for a queue pair: {error}") from error

    def register(self, address: int, size_bytes: int, *, remote: bool) -> IbRegion:
        access = ACCESS_REMOTE if remote else ACCESS_LOCAL
        try:
            return IbRegion(self._domain.reg_mr(address, size_bytes, access), address, size_bytes)
        except OSError as error:
            raise RdmaUnavailable(explain_registration(self.name, size_bytes, error)) from error

    def register_dmabuf(
        self, fd: int, offset: int, size_bytes: int, address: int, *, remote: bool
    ) -> IbRegion:
        access = ACCESS_REMOTE if remote else ACCESS_LOCAL
        try:
            region = self._domain.reg_dmabuf_mr(offset, size_bytes, address, fd, access)
        except OSError as error:
            raise RdmaUnavailable(f"{self.name} takes no dma-buf: {error}") from error
        return IbRegion(region, address, size_bytes)

    def completion_queue(self, capacity: int) -> IbCompletionQueue:
        try:
            return IbCompletionQueue(self._context, capacity)
        except OSError as error:
            raise RdmaUnavailable(f"{self.name} has no room for a completion queue: {error}") from error

    def queue_pair(
        self,
        completions: CompletionQueue,
        *,
        max_requests: int,
        max_receives: int = 1,
        remote_access: bool = False,
    ) -> IbQueuePair:
        assert isinstance(completions, IbCompletionQueue)
        return IbQueuePair(self, completions.queue, max_requests, max_receives, remote_access)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._domain.close()
            self._context.close()


class IbBinding:
    name = "ibverbs"

    def device_names(self) -> list[str]:
        try:
            return [device.name for device in ib.get_device_list()]
        except OSError as error:
            raise RdmaUnavailable(f"libibverbs lists no devices: {error}") from error

    def is_active(self, device_name: str) -> bool:
        return verbs_sysfs.is_active(device_name)

    def open(self, device_name: str) -> IbDevice:
        return IbDevice(device_name)


BINDING = IbBinding()
