"""Are two processes on one host? Shared memory is offered only to those that give the same host id."""

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
