"""Are two processes on one host? Shared memory is offered only to those that give the same host id."""

import contextlib
import functools
import socket
from pathlib import Path

import xxhash


@functools.cache
def host_id() -> str:
    """Equal for all processes between two boots of one host, also in containers that keep its host name."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        # Without it nothing may be taken for granted, not even that this host is this host.
        return ""
    return xxhash.xxh3_128_hexdigest(f"{boot_id}\0{socket.gethostname()}".encode())


def hurry_within_host(sock: socket.socket) -> None:
    """For a connected TCP socket. Within a host there is no network to be careful with, and a congestion
    control that paces what is sent (BBR) only makes it wait: a put of 1 MiB took twice as long. Reno is in
    every kernel and free for all; where it cannot be had, or the peer has left, nothing changes."""
    with contextlib.suppress(OSError):
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
