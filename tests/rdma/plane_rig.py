"""Clients on h0 of a store on h1, over soft-RoCE."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import CLIENT_HOST, SERVER_HOST

DEADLINE_S = 60.0
STORE_DEVICES = ",".join(SERVER_HOST.devices)
CLIENT_DEVICES = ",".join(CLIENT_HOST.devices)
OpenClient = Callable[..., StoreClient]


class Peer:
    """What the transport contract calls a client. Nothing is so small that it goes another way."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.transport = move_everything(client)

    def reserve(self, keys: list[bytes], size_bytes: int, num_layers: int) -> list[Status]:
        return self.client.reserve(keys, size_bytes, num_layers)

    def abort(self, keys: list[bytes]) -> None:
        self.client.abort(keys)


class Rig:
    def __init__(self, open_client: OpenClient) -> None:
        self._open_client = open_client

    def open(self) -> Peer:
        return Peer(self._open_client())


def move_everything(client: StoreClient):
    plane = client.plane
    assert plane is not None and plane.name == "rdma", client.counters()
    plane.inline_read_bytes = plane.inline_put_bytes = 0
    return plane


@contextlib.contextmanager
def store_on_server(folder: Path, *flags: str, pool: str = "64mb") -> Iterator[StoreProcess]:
    """A store on h1 that offers its pool on h1's devices."""
    store = StoreProcess(
        folder,
        *("--device-name", STORE_DEVICES, *flags),
        pool=pool,
        host=SERVER_HOST.address,
        enter=SERVER_HOST.enter,
    ).start()
    try:
        yield store
    finally:
        store.stop()


@contextlib.contextmanager
def opener(store: StoreProcess, **defaults: object) -> Iterator[OpenClient]:
    """Opens clients on h0's devices and closes them again; what they have stored is removed."""
    with contextlib.ExitStack() as closing:

        def open_one(**options: object) -> StoreClient:
            options = {
                "planes": ("rdma", "tcp"),
                "device_name": CLIENT_DEVICES,
                # On a busy machine silence is no sign of death.
                **dict.fromkeys(("timeout_ms", "connect_timeout_ms", "silence_ms"), 30_000),
                **defaults,
                **options,
            }
            client = closing.enter_context(StoreClient.connect(store.address, **options))
            assert client.connected, client.counters()
            return client

        yield open_one
        cleaner = open_one(planes=("tcp",))
        for info in cleaner.list_keys()[0]:
            cleaner.remove(info.key, force=True)


def tcp_bytes() -> int:
    """Over the wire that carries TCP, both ways."""
    statistics = Path("/sys/class/net/th0/statistics")
    return sum(int((statistics / f"{way}_bytes").read_text()) for way in ("rx", "tx"))


def eventually(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "this should have happened by now"
        time.sleep(0.02)
