"""Which plane a client uses, and why; the reason is kept for logs and counters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.errors import ConfigError, StoreUnavailable
from kvcore.transport.mapping import PoolMapping
from kvcore.transport.shm import ShmTransport
from kvcore.transport.tcp import TcpTransport
from kvcore.wire.messages import HelloReply

Plane = TcpTransport | ShmTransport


class Choice(NamedTuple):
    plane: Plane
    reason: str


def open_shm(inline: TcpTransport, reply: HelloReply, timeout_s: float, verify: bool) -> Plane:
    if reply.shm is None:
        raise StoreUnavailable("the store does not offer it to this client (another host?)")
    mapping = PoolMapping.attach(reply.shm, timeout_s)
    return ShmTransport(inline, mapping, lease_ms=reply.default_lease_ms, verify=verify)


def open_tcp(inline: TcpTransport, reply: HelloReply, timeout_s: float, verify: bool) -> Plane:
    return inline


OPENERS: dict[str, Callable[[TcpTransport, HelloReply, float, bool], Plane]] = {
    "shm": open_shm,
    "tcp": open_tcp,
}


def check_planes(wanted: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in OPENERS:
            raise ConfigError(f"unknown plane {name!r}: choose from {', '.join(sorted(OPENERS))}")
    return list(wanted)


def choose_plane(
    wanted: Sequence[str], inline: TcpTransport, reply: HelloReply, timeout_s: float, *, verify_shm: bool
) -> Choice:
    """The first of `wanted` that works. tcp needs nothing but the connection there is, so it always does."""
    reasons: list[str] = []
    for name in wanted:
        if name not in reply.planes:
            reasons.append(f"{name}: the store does not have it")
            continue
        try:
            plane = OPENERS[name](inline, reply, timeout_s, verify_shm)
        except StoreUnavailable as error:
            reasons.append(f"{name}: {error}")
            continue
        return Choice(plane, "; ".join(reasons) or "first choice")
    return Choice(inline, "; ".join(reasons) or "nothing else was wanted")
