"""The client's TLS socket: bytes through it stay what they are, whatever the peer does."""

import random
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kvcore.client.address import Address, parse_address
from kvcore.client.tls import TlsSocket, client_context
from kvcore.errors import ConfigError

NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
SECURE = Address("localhost", 1, is_tls=True)


class Peer:
    """The other end, by Python's own TLS. Receives only when told to."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self._raw = sock
        self._context = context
        self.tls: ssl.SSLSocket | None = None

    def shake_hands(self) -> None:
        self.tls = self._context.wrap_socket(self._raw, server_side=True)

    def receive(self, size: int) -> bytes:
        assert self.tls is not None
        data = b""
        while len(data) < size:
            data += self.tls.recv(size - len(data))
        return data


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pair(authority: trustme.CA) -> Iterator[tuple[TlsSocket, Peer]]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 << 10)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    peer = Peer(theirs, server)
    thread = threading.Thread(target=peer.shake_hands)
    thread.start()
    client = ssl.create_default_context()
    authority.configure_trust(client)
    secure = TlsSocket(ours, client, "localhost", 30)
    thread.join(30)
    yield secure, peer
    secure.close()
    if peer.tls is not None:
        peer.tls.close()


def send_all(secure: TlsSocket, buffers: list[memoryview]) -> None:
    """As the client sends: without waiting, again from where it was left."""
    while buffers:
        try:
            size = secure.sendmsg(buffers, (), NO_WAIT)
        except BlockingIOError:
            poller = select.poll()
            poller.register(secure, select.POLLOUT)
            assert poller.poll(30_000)
            continue
        assert size > 0
        while buffers and size >= len(buffers[0]):
            size -= len(buffers.pop(0))
        if size:
            buffers[0] = buffers[0][size:]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_sent_to_a_slow_peer_arrives_whole_and_in_order(
    pair: tuple[TlsSocket, Peer], seed: int
) -> None:
    secure, peer = pair
    rng = random.Random(seed)
    sizes = [rng.choice([1, 2, 13, 5_000, 128 << 10, 300_000]) for _ in range(30)]
    data = rng.randbytes(sum(sizes))
    views, begin = [], 0
    for size in sizes:
        views.append(memoryview(data)[begin : begin + size])
        begin += size
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(peer.receive(len(data))))
    thread.start()
    while views:  # several messages, some of one buffer
        count = rng.randrange(1, 8)
        send_all(secure, views[:count])
        del views[:count]
    thread.join(60)
    assert received == [data]


def test_a_peer_that_takes_nothing_does_not_block_the_sender(pair: tuple[TlsSocket, Peer]) -> None:
    secure, peer = pair
    data = memoryview(random.Random(1).randbytes(1 << 20))
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            sent += secure.send(data[sent:], NO_WAIT)
    assert 0 < sent < len(data)
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(peer.receive(len(data))))
    thread.start()
    send_all(secure, [data[sent:]])
    thread.join(60)
    assert received == [data]


def test_receiving_fills_several_buffers_and_tells_the_end(pair: tuple[TlsSocket, Peer]) -> None:
    secure, peer = pair
    assert peer.tls is not None
    with pytest.raises(BlockingIOError):
        secure.recv_into(memoryview(bytearray(10)), 0, socket.MSG_DONTWAIT)
    data = random.Random(2).randbytes(20_000)
    peer.tls.sendall(data)
    places = [memoryview(bytearray(size)) for size in (1, 9_999, 10_000)]
    total = 0
    while total < len(data):
        rest, skipped = [], total
        for place in places:
            rest.append(place[min(skipped, len(place)) :])
            skipped -= min(skipped, len(place))
        total += secure.recvmsg_into([view for view in rest if len(view)], 0, socket.MSG_WAITALL)[0]
    assert b"".join(places) == data
    peer.tls.close()
    assert secure.recv_into(memoryview(bytearray(10))) == 0


def test_sending_and_receiving_at_once(pair: tuple[TlsSocket, Peer]) -> None:
    secure, peer = pair
    assert peer.tls is not None
    up, down = random.Random(3).randbytes(3 << 20), random.Random(4).randbytes(3 << 20)
    got: list[bytes] = []

    def talk() -> None:
        sender = threading.Thread(target=lambda: peer.tls and peer.tls.sendall(down))
        sender.start()
        got.append(peer.receive(len(up)))
        sender.join(60)

    threads = [
        threading.Thread(target=talk),
        threading.Thread(target=send_all, args=(secure, [memoryview(up)])),
    ]
    for thread in threads:
        thread.start()
    place = memoryview(bytearray(len(down)))
    total = 0
    while total < len(down):
        total += secure.recv_into(place[total:])
    for thread in threads:
        thread.join(60)
    assert got == [up] and place == down


def test_a_peer_that_hangs_up_in_the_handshake_is_a_connection_error(authority: trustme.CA) -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    client = ssl.create_default_context()
    authority.configure_trust(client)
    with ours, pytest.raises(OSError):
        TlsSocket(ours, client, "localhost", 5)


def test_addresses() -> None:
    address = parse_address("tls://store.example:7")
    assert address == Address("store.example", 7, is_tls=True) and str(address) == "tls://store.example:7"
    assert not parse_address("tcp://h:1").is_tls
    with pytest.raises(ConfigError, match="tls://host:port"):
        parse_address("https://h:1")


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert client_context(Address("h", 1), "", "", "") is None
    with pytest.raises(ConfigError, match="is no tls:// address"):
        client_context(Address("h", 1), "ca.pem", "", "")
    with pytest.raises(ConfigError, match="or neither"):
        client_context(SECURE, "", "cert.pem", "")
    with pytest.raises(ConfigError, match=r"nowhere\.pem cannot be used"):
        client_context(SECURE, str(tmp_path / "nowhere.pem"), "", "")
    (tmp_path / "junk.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"junk\.pem cannot be used"):
        client_context(SECURE, str(tmp_path / "junk.pem"), "", "")
