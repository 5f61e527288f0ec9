"""Queue pairs of clients at the store: who gets one, and when it is gone."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvcore.errors import ConfigError, RequestRefused
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.transport.verbs_fake import FakeFabric
from kvcore.wire.messages import (
    ConnectQueuePair,
    ConnectQueuePairReply,
    DisconnectQueuePair,
    ErrorCode,
    QueuePairAddress,
    Reply,
)
from store_server.core.objects import Session
from store_server.rdma import MAX_PAIRS_PER_CLIENT, RdmaPoint

POOL = bytearray(1 << 20)
PEER = QueuePairAddress(7, 0, b"client0".ljust(16, b"\0"), 0, 5)


class Rig:
    def __init__(self, devices: str = "") -> None:
        self.fabric = FakeFabric("store0", "store1", "client0")
        self.ended: list[int] = []
        self.devices = devices

    def run(self, body: Callable[[RdmaPoint], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            self.told = asyncio.Event()
            loop = asyncio.get_running_loop()
            point = RdmaPoint(memoryview(POOL), self.devices, self._access_ended, lambda: self.fabric, loop)
            await body(point)
            point.close()

        asyncio.run(main())
        assert all(not device.pairs and not device.regions for device in self.fabric.devices.values())

    async def connect(self, point: RdmaPoint, session: Session, device: str = "store0") -> Reply:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        point.connect(session, ConnectQueuePair(1, device, PEER), answer.set_result)
        return await answer

    def _access_ended(self, session: Session) -> None:
        # By now the queue pair is gone: whoever is told may use the extents again.
        self.ended.append(sum(len(device.pairs) for device in self.fabric.devices.values()))
        if not session.has_direct_access:
            self.told.set()


def test_a_queue_pair_is_gone_before_anybody_hears_of_it() -> None:
    rig = Rig("store0,store1")

    async def body(point: RdmaPoint) -> None:
        session = Session(1)
        assert point.offer.devices == ["store0", "store1"] and point.offer.pool_size_bytes == len(POOL)
        first = await rig.connect(point, session)
        second = await rig.connect(point, session, "store1")
        assert isinstance(first, ConnectQueuePairReply) and isinstance(second, ConnectQueuePairReply)
        assert session.num_queue_pairs == point.num_pairs == 2
        point.disconnect(session, DisconnectQueuePair(2, "store0", first.address.number))
        assert rig.ended == [1] and session.num_queue_pairs == 1
        point.disconnect(session, DisconnectQueuePair(3, "store0", first.address.number))
        assert rig.ended == [1]
        point.withdraw(session)
        assert session.has_direct_access
        await rig.told.wait()
        assert rig.ended == [1, 0] and not session.has_direct_access

    rig.run(body)


def test_nobody_else_may_disconnect_it() -> None:
    rig = Rig("store0")

    async def body(point: RdmaPoint) -> None:
        session, other = Session(1), Session(2)
        reply = await rig.connect(point, session)
        assert isinstance(reply, ConnectQueuePairReply)
        point.disconnect(other, DisconnectQueuePair(2, "store0", reply.address.number))
        assert point.num_pairs == 1 and rig.ended == []

    rig.run(body)


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_a_client_that_leaves_while_it_is_being_connected_gets_nothing(wait_s: float) -> None:
    rig = Rig("store0")

    async def body(point: RdmaPoint) -> None:
        session = Session(1)
        answers: list[Reply] = []
        point.connect(session, ConnectQueuePair(1, "store0", PEER), answers.append)
        point.withdraw(session)
        await asyncio.sleep(wait_s)
        assert answers == [] and session.num_queue_pairs == 0 and point.num_pairs == 0

    rig.run(body)


def test_what_cannot_be_is_refused() -> None:
    rig = Rig("store0")

    async def body(point: RdmaPoint) -> None:
        session = Session(1)
        with pytest.raises(RequestRefused, match="the pool is not on a device 'store1'"):
            await rig.connect(point, session, "store1")
        for _ in range(MAX_PAIRS_PER_CLIENT):
            await rig.connect(point, session)
        with pytest.raises(RequestRefused) as refused:
            await rig.connect(point, session)
        assert refused.value.code == ErrorCode.OVER_LIMIT
        point.withdraw(session)

    rig.run(body)


def test_devices_that_do_not_take_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.fabric.devices["store0"].is_full = True

    async def body(point: RdmaPoint) -> None:
        assert point.offer.devices == ["client0", "store1"] or point.offer.devices == ["store1", "client0"]

    rig.run(body)
    assert "not offered on store0" in caplog.text
    for device in rig.fabric.devices.values():
        device.is_full = True
    with pytest.raises(RdmaUnavailable, match="cannot register"):
        rig.run(body)
    with pytest.raises(ConfigError, match="'mlx5_0' is not on this host"):
        Rig("mlx5_0").run(body)
