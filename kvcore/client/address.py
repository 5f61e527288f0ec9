"""Where a store listens: "127.0.0.1:50051", "tcp://host:port", "tls://host:port" or "unix:///path"."""

import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcore.errors import ConfigError
from kvcore.transport.host import hurry_within_host

DEFAULT_PORT = 50051
KEEPALIVE_S = 10
LOST_PEER_MS = 10_000


class Address(NamedTuple):
    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        name = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"tls://{name}" if self.is_tls else name


def parse_address(text: str) -> Address:
    scheme, separator, rest = text.partition("://")
    if scheme == "unix" and separator:
        if not rest.startswith("/"):
            raise ConfigError(f"store address {text!r}: write an absolute path, as in unix:///run/store.sock")
        return Address(path=rest)
    if separator and scheme not in ("tcp", "tls"):
        raise ConfigError(
            f"store address {text!r}: write host:port, tcp://host:port, tls://host:port or unix:///path"
        )
    try:
        parts = urlsplit("//" + (rest if separator else text))
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"store address {text!r}: {error}") from error
    if not host or parts.path or parts.query or parts.username:
        raise ConfigError(f"store address {text!r}: write host:port, for example 127.0.0.1:{DEFAULT_PORT}")
    is_tls = bool(separator) and scheme == "tls"
    return Address(host=host, port=DEFAULT_PORT if port is None else port, is_tls=is_tls)


def open_socket(address: Address, timeout_s: float) -> socket.socket:
    """A connected blocking socket. OSError when nobody answers in time."""
    if address.path:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(address.path)
        except OSError:
            sock.close()
            raise
    else:
        sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    sock.settimeout(None)
    tune_socket(sock)
    return sock


def tune_socket(sock: socket.socket) -> None:
    """No delay for small messages, none for large ones within a host; a peer that vanished without a word is
    noticed within some seconds."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_PEER_MS)
    hurry_within_host(sock)
