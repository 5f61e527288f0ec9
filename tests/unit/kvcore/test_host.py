"""Within a host nothing is paced; elsewhere the system's congestion control is left alone."""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import cast

import pytest
import uvloop

from kvcore.client.address import Address, open_socket
from kvcore.transport.host import hurry_within_host


def congestion_control(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


class Socket:
    """Connected from `here` to `there`; says `error` to whoever wants to change it."""

    def __init__(self, here: str, there: str, error: OSError | None = None) -> None:
        self.here, self.there, self.error = here, there, error
        self.options: list[object] = []

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1000

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2000

    def setsockopt(self, *option: object) -> None:
        if self.error is not None:
            raise self.error
        self.options.append(option)


def test_a_client_of_the_same_host_is_not_paced() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_socket(Address("127.0.0.1", listener.getsockname()[1]), 20.0) as sock,
    ):
        assert congestion_control(sock) == b"reno"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_sockets_of_either_loop_can_be_asked(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def connect() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            sock = writer.get_extra_info("socket")
            hurry_within_host(sock)
            assert congestion_control(sock) == b"reno"
            writer.close()
            await writer.wait_closed()

    loop = new_loop()
    try:
        loop.run_until_complete(connect())
    finally:
        loop.close()


@pytest.mark.parametrize(("there", "num_options"), [("10.0.0.1", 1), ("10.0.0.2", 0)])
def test_only_within_a_host(there: str, num_options: int) -> None:
    sock = Socket("10.0.0.1", there)
    hurry_within_host(cast(socket.socket, sock))
    assert len(sock.options) == num_options


def test_a_kernel_that_does_not_have_it_is_no_reason_to_fail() -> None:
    sock = Socket("10.0.0.1", "10.0.0.1", OSError(errno.ENOENT, "no such congestion control"))
    hurry_within_host(cast(socket.socket, sock))
    assert sock.options == []


def test_a_peer_that_has_left_is_no_reason_to_fail() -> None:
    with socket.socket() as sock:  # ENOTCONN, as of one that was reset before it was accepted
        hurry_within_host(sock)
