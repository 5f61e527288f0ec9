"""A real store behind TLS: both clients, both ends' certificates, and what is turned away."""

import asyncio
import random
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
import uvloop

from kvcore.client.async_client import AsyncStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from store_server.cli import main
from store_server.config import StoreConfig
from store_server.serve import exposure_warnings
from tests.integration.store_harness import DEADLINE_S, MIB, StoreProcess, eventually, store_starter
from tests.integration.store_process import PATIENT
from tests.integration.store_process import StoreProcess as RestartableStore

OK = Status.OK


class Files:
    """Certificates of a store and of a client, signed by one authority, and of a stranger."""

    def __init__(self, folder: Path) -> None:
        ours, strange = trustme.CA(), trustme.CA()
        self.ca, self.strange_ca = str(folder / "ca.pem"), str(folder / "strange-ca.pem")
        ours.cert_pem.write_to_path(self.ca)
        strange.cert_pem.write_to_path(self.strange_ca)
        self.server = self._write(folder, "server", ours.issue_cert("localhost", "127.0.0.1"))
        self.client = self._write(folder, "client", ours.issue_cert("engine@example.org"))
        self.stranger = self._write(folder, "stranger", strange.issue_cert("engine@example.org"))

    @staticmethod
    def _write(folder: Path, name: str, cert: trustme.LeafCert) -> dict[str, str]:
        paths = {"tls_cert": str(folder / f"{name}.pem"), "tls_key": str(folder / f"{name}.key")}
        cert.cert_chain_pems[0].write_to_path(paths["tls_cert"])
        cert.private_key_pem.write_to_path(paths["tls_key"])
        return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def store(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_starter(tmp_path_factory.mktemp("s")) as start:
        yield start(
            "--tls-cert", files.server["tls_cert"], "--tls-key", files.server["tls_key"], pool_size="128mb"
        )


def test_objects_of_all_sizes_come_back(store: StoreProcess, files: Files) -> None:
    assert store.ready["address"].startswith("tls://")
    rng = random.Random(1)
    values = {f"object {size}": rng.randbytes(size) for size in (1, 100, 4096, 65_537, MIB, 20 * MIB + 3)}
    with StoreClient.connect(store.ready["address"], planes=("tcp",), tls_ca=files.ca, **PATIENT) as client:
        for name, value in values.items():
            assert client.put(name, value) is OK
        for name, value in values.items():
            assert client.get(name) == value
        places = [bytearray(len(value)) for value in values.values()]
        assert client.batch_get_into(list(values), places) == [len(value) for value in values.values()]
        assert [bytes(place) for place in places] == list(values.values())
    eventually(lambda: store.stats()["quarantined_bytes"] == 0)


def test_layers_and_many_threads_over_one_connection(store: StoreProcess, files: Files) -> None:
    layer_bytes, num_layers = 200_000, 4
    failures: list[object] = []
    with StoreClient.connect(store.ready["address"], planes=("tcp",), tls_ca=files.ca, **PATIENT) as client:

        def work(number: int) -> None:
            keys = [bytes([number, block]) * 16 for block in range(3)]
            data = [
                random.Random(number * 10 + block).randbytes(layer_bytes * num_layers) for block in range(3)
            ]
            assert client.reserve(keys, layer_bytes * num_layers, num_layers) == [OK] * 3
            for layer in range(num_layers):
                begin = layer * layer_bytes
                views = [memoryview(one)[begin : begin + layer_bytes] for one in data]
                assert client.write_layers(keys, layer, layer + 1, views).wait() == [OK] * 3
            places = [bytearray(layer_bytes * num_layers) for _ in keys]
            assert client.read_layers(keys, 0, num_layers, places).wait() == [OK] * 3
            assert [bytes(place) for place in places] == data

        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert failures == []


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_asyncio_client(store: StoreProcess, files: Files, run: object) -> None:
    value = random.Random(5).randbytes(3 * MIB)

    async def use() -> None:
        async with await AsyncStoreClient.connect(
            store.ready["address"], tls_ca=files.ca, **PATIENT
        ) as client:
            await client.remove("async")
            assert await client.put("async", value) is OK
            answers = await asyncio.gather(*(client.get("async") for _ in range(5)))
            assert answers == [value] * 5

    run(use())  # type: ignore[operator]


def test_shm_is_agreed_on_over_tls(store: StoreProcess, files: Files) -> None:
    with StoreClient.connect(store.ready["address"], tls_ca=files.ca) as client:
        assert client.plane is not None and client.plane.name == "shm"
        assert client.put("over shm", b"x" * 300_000) is OK and client.get("over shm") == b"x" * 300_000


def test_a_store_we_do_not_trust_is_no_store(store: StoreProcess, files: Files) -> None:
    for ca in (files.strange_ca, ""):
        with StoreClient.connect(store.ready["address"], tls_ca=ca) as client:
            assert not client.connected and client.put("x", b"y") is Status.UNAVAILABLE
            assert "certificate verify failed" in str(client.counters()["last_error"])


def test_the_command_line(store: StoreProcess, files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    address = ("--address", store.ready["address"])
    assert main(["stats", *address, "--tls-ca", files.ca, "--json"]) == 0
    assert main(["stats", *address]) == 1
    assert "certificate verify failed" in capsys.readouterr().err
    assert (
        main(["stats", "--address", store.ready["address"].removeprefix("tls://"), "--tls-ca", files.ca]) == 2
    )


def test_who_speaks_no_tls_is_turned_away(store: StoreProcess, files: Files) -> None:
    with socket.create_connection((store.ready["host"], store.ready["port"]), DEADLINE_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        received = b""
        try:
            while data := plain.recv(4096):
                received += data
        except ConnectionError:
            pass
        assert len(received) < 100
    old = ssl.create_default_context(cafile=files.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    where = (store.ready["host"], store.ready["port"])
    with socket.create_connection(where, DEADLINE_S) as sock, pytest.raises(ssl.SSLError):
        old.wrap_socket(sock, server_hostname="localhost")
    with StoreClient.connect(store.ready["address"], tls_ca=files.ca) as client:
        assert client.connected, "nobody else has noticed"


def test_clients_may_have_to_show_a_certificate(files: Files, tmp_path: Path) -> None:
    flags = ["--tls-cert", files.server["tls_cert"], "--tls-key", files.server["tls_key"]]
    with store_starter(tmp_path) as start:
        store = start(*flags, "--tls-client-ca", files.ca)
        address = store.ready["address"]
        with StoreClient.connect(address, tls_ca=files.ca, **files.client) as client:
            assert client.connected and client.put("x", b"y") is OK
        for other in ({}, files.stranger):
            with StoreClient.connect(address, tls_ca=files.ca, **other) as client:
                assert not client.connected


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--tls-key", "x.key"], "need a tls_cert"),
        (["--tls-cert", "/nowhere.pem"], "/nowhere.pem cannot be used"),
    ],
)
def test_mistakes_in_the_configuration(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--admin-port", "-1", "--pool-size", "1mb", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_whoever_opens_the_store_to_others_is_warned() -> None:
    assert exposure_warnings(StoreConfig()) == []
    assert exposure_warnings(StoreConfig(host="::1", admin_host="localhost")) == []
    open_to_all = " ".join(exposure_warnings(StoreConfig(host="0.0.0.0")))
    assert "anybody who can reach 0.0.0.0" in open_to_all and "tls_cert" in open_to_all
    (in_clear,) = exposure_warnings(StoreConfig(host="0.0.0.0", token="t"))
    assert "tokens too" in in_clear
    assert exposure_warnings(StoreConfig(host="0.0.0.0", token="t", tls_cert="c")) == []
    (admin,) = exposure_warnings(StoreConfig(admin_host="0.0.0.0"))
    assert "/metrics" in admin


def test_a_store_that_was_killed_is_a_miss_and_then_found_again(files: Files, tmp_path: Path) -> None:
    flags = ("--tls-cert", files.server["tls_cert"], "--tls-key", files.server["tls_key"])
    store = RestartableStore(tmp_path, *flags).start()
    try:
        address = f"tls://{store.address}"
        with StoreClient.connect(address, planes=("tcp",), tls_ca=files.ca, **PATIENT) as client:
            assert client.put("x", b"y" * 100_000) is OK
            store.kill()
            assert client.get("x") is None
            assert client.put("x", b"y") is Status.UNAVAILABLE
            store.start()
            eventually(lambda: client.connected)
            assert client.get("x") is None, "it has forgotten everything"
            assert client.put("x", b"z" * 100_000) is OK and client.get("x") == b"z" * 100_000
    finally:
        store.stop()
