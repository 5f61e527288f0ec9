"""How a store goes to others that objects are copied from: with the planes and devices of its clients."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError
from kvcore.wire.messages import CopyFrom, Reply, Status, StatusReply
from store_server.config import StoreConfig
from store_server.peers import Peers
from store_server.peers_config import PeersConfig
from store_server.server import StoreServer
from store_server.tenants import Client


class Away:
    """A client whose store is not there."""

    connected = False
    plane = None

    def describe(self, keys: list[bytes]) -> list[None]:
        return [None] * len(keys)

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("planes", "best_first"),
    [
        (("tcp", "rdma"), ["rdma", "tcp"]),
        (("tcp",), ["tcp"]),
        (("rdma", "shm", "tcp"), ["rdma", "shm", "tcp"]),
    ],
)
def test_a_copy_comes_as_clients_do(
    planes: tuple[str, ...], best_first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def connect(address: str, **options: Any) -> Away:
        asked.append({"address": address, **options})
        return Away()

    async def main() -> None:
        monkeypatch.setattr(StoreClient, "connect", connect)
        config = StoreConfig(pool_size_bytes=16 << 20, planes=planes, device_name="mlx5_2")
        server = StoreServer(config)
        answered: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        request = CopyFrom(1, [bytes(32)], "far:50051", [], 60_000)
        assert server.copies.copy(request, Client(token="secret"), answered.set_result) is None
        reply = await asyncio.wait_for(answered, 60)
        assert isinstance(reply, StatusReply) and list(reply.statuses) == [Status.UNAVAILABLE]
        await server.copies.close()
        server.pool.close()

    asyncio.run(main())
    (options,) = asked
    assert (options["address"], options["token"]) == ("far:50051", "secret")
    assert options["planes"] == best_first and options["device_name"] == "mlx5_2"


def test_without_the_device_it_was_given_a_store_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    planes_asked: list[list[str]] = []

    def connect(address: str, *, planes: list[str], **_: Any) -> Away:
        planes_asked.append(planes)
        if "rdma" in planes or len(planes_asked) > 2:
            raise ConfigError("no such device")
        return Away()

    async def main() -> None:
        monkeypatch.setattr(StoreClient, "connect", connect)
        with ThreadPoolExecutor(1) as threads:
            peers = Peers(PeersConfig(), threads, ["rdma", "tcp"], "mlx5_2")
            peer = await peers.take("far:50051", "")
            assert peer is not None and planes_asked == [["rdma", "tcp"], ["tcp"]]
            # A mistake of another kind is one.
            assert await Peers(PeersConfig(), threads, ["tcp"], "").take("other:50051", "") is None
            peers.give_back(peer)
            await peers.close()

    asyncio.run(main())
