"""Copies from one real store to another: the same bytes, and nothing half-written when something fails."""

import contextlib
import json
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import metrics
from kvcore.client.async_client import AsyncStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import CopyFrom, ErrorCode, ErrorReply, PinKind, Status, Tier
from tests.integration.router_harness import async_test
from tests.integration.store_harness import MIB, StoreProcess, eventually, store_starter
from tests.integration.store_process import PATIENT as PATIENT_CLIENT
from tests.integration.test_store_ssd import levels
from tests.integration.test_store_tls import Files

OK, MISSING, PENDING, FULL = Status.OK, Status.MISSING, Status.PENDING, Status.FULL
UNAVAILABLE = Status.UNAVAILABLE
LAYERS, SIZE = 8, 64 << 10
WAIT_MS = 60_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def value(number: int, size_bytes: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size_bytes)


KEYS = [key(number) for number in range(20)]
# Test machines are slow. Of two equal flags the last one counts.
PATIENT = ("--peers.answer-timeout-ms", "60s", "--peers.timeout-ms", "60s")


def address(store: StoreProcess) -> str:
    return f"127.0.0.1:{store.ready['port']}"


def client_of(store: StoreProcess, **options: Any) -> StoreClient:
    return StoreClient.connect(address(store), **PATIENT_CLIENT, **options)


def fill(client: StoreClient, keys: list[bytes], num_layers: int = LAYERS) -> None:
    assert client.reserve(keys, SIZE, num_layers) == [OK] * len(keys)
    values = [value(int.from_bytes(name, "big")) for name in keys]
    assert client.write_layers(keys, 0, num_layers, values).wait() == [OK] * len(keys)


def read(client: StoreClient, names: list[bytes], size_bytes: int = SIZE) -> list[bytes]:
    buffers = [bytearray(size_bytes) for _ in names]
    assert client.batch_get_into(names, buffers) == [size_bytes] * len(names)
    return [bytes(buffer) for buffer in buffers]


Start = Callable[..., StoreProcess]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Each store with a directory of its own."""
    with contextlib.ExitStack() as stack:

        def start_one(*flags: str, **options: object) -> StoreProcess:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mks-")))
            return stack.enter_context(store_starter(folder))(*PATIENT, *flags, **options)

        yield start_one


@pytest.fixture(scope="module")
def shared(start: Start) -> tuple[StoreProcess, StoreProcess]:
    # So long that whoever waits for the end of a lease waits in vain: they have to be given back.
    return start("--default-lease-ms", "10min"), start()


def is_emptied(client: StoreClient) -> bool:
    client.evict()
    return client.stats()[metrics.POOL_USED_BYTES] == 0


@pytest.fixture
def pair(shared: tuple[StoreProcess, StoreProcess]) -> Iterator[tuple[StoreProcess, StoreProcess]]:
    """Source and target, both empty."""
    source, target = shared
    with client_of(source) as there, client_of(target) as here:
        for client in (there, here):
            eventually(partial(is_emptied, client))
    yield shared
    source.disconnect()
    target.disconnect()


@pytest.mark.parametrize("planes", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_the_same_objects_are_in_the_other_store(
    pair: tuple[StoreProcess, StoreProcess], start: Start, planes: str
) -> None:
    source, target = pair
    if planes == "tcp":
        source = start("--planes", "tcp")
    before = target.stats()
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS)
        fill(there, [key(100)], num_layers=1)
        names = [*KEYS, key(100), key(999)]
        found = here.copy_from(names, address(source), wait_ms=WAIT_MS)
        assert found == [OK] * 21 + [MISSING]
        assert read(here, names[:-1]) == [value(number) for number in [*range(20), 100]]
        infos = here.describe(names[:-1])
        assert [info.num_layers for info in infos if info is not None] == [LAYERS] * 20 + [1]
        assert target.delta(before, metrics.COPIED_OBJECTS_TOTAL) == 21
        assert target.delta(before, metrics.COPIED_BYTES_TOTAL) == 21 * SIZE
        assert target.delta(before, metrics.COPY_MISSING_TOTAL) == 1
        assert target.delta(before, metrics.COPY_FAILED_TOTAL) == 0
        eventually(lambda: source.stats()[metrics.LEASES] == 0)
        # What is here already is not fetched again.
        reads = source.stats()[metrics.READ_BYTES_TOTAL]
        assert here.copy_from(names, address(source), wait_ms=WAIT_MS) == [OK] * 21 + [MISSING]
        assert source.stats()[metrics.READ_BYTES_TOTAL] == reads
        # Checksums came along: the store can tell what is damaged after the copy.
        assert here.verify(start=True) is not None
        report = eventually(lambda: (one := here.verify()) is not None and not one.is_running and one)
        assert (report.num_corrupt, report.num_unchecked) == (0, 0)


def test_without_waiting_the_copy_goes_on_and_twice_asked_is_fetched_once(
    pair: tuple[StoreProcess, StoreProcess],
) -> None:
    source, target = pair
    before = target.stats()
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS)
        first = here.copy_from(KEYS, address(source))
        assert set(first) <= {PENDING, OK}
        assert here.copy_from(KEYS, address(source), wait_ms=WAIT_MS) == [OK] * 20
        assert target.delta(before, metrics.COPIED_OBJECTS_TOTAL) == 20
        eventually(lambda: target.stats()[metrics.COPYING] == 0)


def test_the_asynchronous_client_asks_the_same(pair: tuple[StoreProcess, StoreProcess]) -> None:
    source, target = pair
    with client_of(source) as there:
        fill(there, KEYS)

    @async_test
    async def check() -> None:
        async with await AsyncStoreClient.connect(address(target)) as here:
            assert await here.copy_from(KEYS, address(source), parents=KEYS, wait_ms=WAIT_MS) == [OK] * 20
            assert await here.get(key(3)) == value(3)

    check()


def test_what_is_damaged_or_unfinished_at_the_source_is_not_copied(
    pair: tuple[StoreProcess, StoreProcess],
) -> None:
    source, target = pair
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS[:2])
        wrong = [key(300)]
        assert source.connect().put(wrong, [value(300)], checksums=[12345]) == [OK]
        assert there.reserve([key(301)], SIZE, LAYERS) == [OK]
        names = [KEYS[0], key(300), key(301), KEYS[1]]
        statuses = here.copy_from(names, address(source), wait_ms=WAIT_MS)
        assert statuses == [OK, Status.CORRUPT, MISSING, OK]
        assert here.batch_status(names) == [OK, MISSING, MISSING, OK]
        eventually(lambda: target.stats()[metrics.OBJECTS_PENDING] == 0)
        # The damaged one is dropped where it lies.
        eventually(lambda: there.batch_status(wrong) == [MISSING])


def test_a_block_that_somebody_writes_here_is_left_to_its_writer(
    pair: tuple[StoreProcess, StoreProcess],
) -> None:
    source, target = pair
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS[:2])
        assert here.reserve(KEYS[:1], SIZE, LAYERS) == [OK]
        assert here.copy_from(KEYS[:2], address(source), wait_ms=WAIT_MS) == [PENDING, OK]
        assert here.write_layers(KEYS[:1], 0, LAYERS, [value(0)]).wait() == [OK]
        assert here.copy_from(KEYS[:2], address(source)) == [OK, OK]


@pytest.mark.slow
def test_what_the_source_has_on_disk_only_is_copied_too(
    pair: tuple[StoreProcess, StoreProcess], start: Start, tmp_path: Path
) -> None:
    source, target = start(*levels(tmp_path)), pair[1]
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS)

        def is_on_disk() -> bool:
            there.evict()
            return all(info is not None and info.tier == Tier.SSD for info in there.describe(KEYS))

        eventually(is_on_disk)
        assert here.copy_from(KEYS, address(source), wait_ms=WAIT_MS) == [OK] * 20
        assert read(here, KEYS) == [value(number) for number in range(20)]


@pytest.mark.slow
def test_a_source_behind_tls_is_shown_our_certificate(
    pair: tuple[StoreProcess, StoreProcess], start: Start, tmp_path: Path
) -> None:
    files = Files(tmp_path)
    cert, key_file = files.server["tls_cert"], files.server["tls_key"]
    source = start("--tls-cert", cert, "--tls-key", key_file, "--tls-client-ca", files.ca)
    cert, key_file = files.client["tls_cert"], files.client["tls_key"]
    target = start("--peers.tls-ca", files.ca, "--peers.tls-cert", cert, "--peers.tls-key", key_file)
    with StoreClient.connect(source.ready["unix_address"]) as there, client_of(target) as here:
        fill(there, KEYS)
        assert here.copy_from(KEYS, f"tls://{address(source)}", wait_ms=WAIT_MS) == [OK] * 20
        assert read(here, KEYS) == [value(number) for number in range(20)]
    with client_of(pair[1]) as without:
        statuses = without.copy_from(KEYS, f"tls://{address(source)}", wait_ms=WAIT_MS)
        assert statuses == [UNAVAILABLE] * 20


@pytest.mark.slow
def test_a_source_that_is_not_there_or_refuses_is_a_status(
    pair: tuple[StoreProcess, StoreProcess], start: Start
) -> None:
    secret, target = start("--token", "other"), pair[1]
    before = target.stats()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with client_of(target) as here:
        assert here.copy_from(KEYS[:2], f"127.0.0.1:{port}", wait_ms=WAIT_MS) == [UNAVAILABLE] * 2
        assert here.copy_from(KEYS[:2], address(secret), wait_ms=WAIT_MS) == [UNAVAILABLE] * 2
        assert target.delta(before, metrics.COPY_FAILED_TOTAL) == 4
        assert here.put(key(0), value(0)) is OK, "nothing holds the keys"


@pytest.mark.slow
def test_a_source_that_stalls_or_dies_leaves_whole_objects_or_none(
    pair: tuple[StoreProcess, StoreProcess], start: Start
) -> None:
    source, target = start(), start("--peers.answer-timeout-ms", "2s")
    names = [key(number) for number in range(512)]
    with client_of(source) as there, client_of(target) as here:
        fill(there, names)
        # Once a copy has begun the source stands still, and is not waited for as long as the client would.
        before = target.stats()
        answer: list[list[Status]] = []

        def ask() -> None:
            answer.append(here.copy_from(names, address(source), wait_ms=WAIT_MS))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: target.delta(before, metrics.LAYERS_COMMITTED_TOTAL) > 0)
        source.process.send_signal(signal.SIGSTOP)
        asking.join(WAIT_MS / 1e3)
        source.process.send_signal(signal.SIGKILL)
        (statuses,) = answer
        assert set(statuses) <= {OK, UNAVAILABLE, Status.TIMED_OUT}
        whole = [number for number, status in enumerate(statuses) if status is OK]
        rest = [name for name, status in zip(names, statuses, strict=True) if status is not OK]
        assert read(here, [key(number) for number in whole]) == [value(number) for number in whole]
        assert here.batch_status(rest) == [MISSING] * len(rest)
        eventually(lambda: target.stats()[metrics.OBJECTS_PENDING] == 0)
        assert here.copy_from(rest[:1], address(source), wait_ms=WAIT_MS) == [UNAVAILABLE][: len(rest)]
        if rest:
            fill(here, rest[:1])


@pytest.mark.slow
def test_a_store_that_ends_while_it_copies_ends_well(
    pair: tuple[StoreProcess, StoreProcess], start: Start
) -> None:
    source, target = pair[0], start()
    with client_of(source) as there, client_of(target) as here:
        fill(there, KEYS)
        assert here.copy_from(KEYS[:1], address(source), wait_ms=WAIT_MS) == [OK], "they know each other"
        source.process.send_signal(signal.SIGSTOP)
        try:
            assert set(here.copy_from(KEYS[1:], address(source))) == {PENDING}
            assert target.stop() == 0
        finally:
            source.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_tenants_copy_their_own_within_their_quota_and_from_named_sources(start: Start) -> None:
    tenants = [
        {"name": "a", "token": "token-of-a", "dram_quota": "2mb"},
        {"name": "b", "token": "token-of-b"},
    ]
    flags = ("--token", "operator", "--tenants", json.dumps(tenants))
    source = start(*flags)
    target = start(*flags, "--peers.sources", address(source))
    a = {"token": "token-of-a"}
    with client_of(source, **a) as there, client_of(target, **a) as here:
        with client_of(target, token="token-of-b") as b:
            assert b.put(key(0), b"of b") is OK
            fill(there, KEYS)
            assert here.copy_from(KEYS, address(source), wait_ms=WAIT_MS) == [OK] * 20
            assert read(here, KEYS) == [value(number) for number in range(20)]
            assert b.get(key(0)) == b"of b"
        # The quota of a holds here as well: what is pinned in it leaves no room for more.
        assert here.batch_pin(KEYS, PinKind.HARD) == [OK] * 20
        more = [key(number) for number in range(200, 220)]
        fill(there, more)
        statuses = here.copy_from(more, address(source), wait_ms=WAIT_MS)
        assert set(statuses) == {OK, FULL}
        assert here.stats()[metrics.POOL_USED_BYTES] <= 2 * MIB
        # What is the operator's cannot be had with the token of a.
        others = [key(number) for number in range(300, 302)]
        with client_of(source, token="operator") as operator:
            fill(operator, others)
        assert here.copy_from(others, address(source), wait_ms=WAIT_MS) == [MISSING] * 2
    fields: dict[str, Any] = {"keys": KEYS, "parents": [], "source": "127.0.0.1:2"}
    cases = [(target, "operator"), (target, "token-of-a"), (source, "token-of-a")]
    for store, token in cases:
        reply, _ = store.connect(token=token).ask(CopyFrom, **fields)
        assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.FORBIDDEN
        assert "peers.sources" in reply.message
    operator_of_source = source.connect(token="operator")
    for wrong in ({"source": "x:y"}, {"source": "ftp://x"}, {"parents": [b"p"]}):
        reply, _ = operator_of_source.ask(CopyFrom, **{**fields, **wrong})
        assert isinstance(reply, ErrorReply) and reply.code == ErrorCode.BAD_REQUEST, wrong


@pytest.mark.slow
def test_more_than_fits_pushes_out_nothing_that_is_pinned(
    pair: tuple[StoreProcess, StoreProcess], start: Start
) -> None:
    source, target = pair[0], start("--max-waiting-keys", "64", pool_size="2mb")
    names = [key(number) for number in range(64)]
    with client_of(source) as there, client_of(target) as here:
        fill(there, names)
        assert here.put(key(500), value(500)) is OK
        assert here.pin(key(500), PinKind.HARD) is OK
        statuses = here.copy_from(names, address(source), wait_ms=WAIT_MS)
        assert set(statuses) <= {OK, FULL} and OK in statuses
        assert here.get(key(500)) == value(500)
        assert here.copy_from([key(700)], address(target), wait_ms=WAIT_MS) == [MISSING], "from itself"
        too_many = [key(number) for number in range(65)]
        assert here.copy_from(too_many, address(source), wait_ms=WAIT_MS) == [UNAVAILABLE] * 65
