"""Which plane a client uses, and why; the reason is kept for logs and counters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcore.errors import ConfigError, StoreUnavailable
from kvcore.transport.mapping import PoolMapping
from kvcore.transport.rdma import RdmaTransport
from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.shm import ShmTransport
from kvcore.transport.tcp import TcpTransport
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.wire.messages import HelloReply

Plane = TcpTransport | ShmTransport | RdmaTransport


class Means(NamedTuple):
    """What a plane can be made of. `inline`: the tcp plane of the connection; `reply`: what the store offers;
    `rdma`: devices of this host, or why there are none."""

    inline: TcpTransport
    reply: HelloReply
    timeout_s: float
    verify_shm: bool
    rdma: RdmaHost | str


class Choice(NamedTuple):
    plane: Plane
    reason: str


def open_rdma(means: Means) -> Plane:
    offer = means.reply.rdma
    if isinstance(means.rdma, str):
        raise RdmaUnavailable(means.rdma)
    if offer is None:
        raise RdmaUnavailable("the store does not offer it to this client")
    lease_ms, verify = means.reply.default_lease_ms, means.inline.checksums
    plane = RdmaTransport(means.inline, means.rdma, offer, lease_ms=lease_ms, verify=verify)
    plane.open(means.timeout_s)
    return plane


def open_shm(means: Means) -> Plane:
    if means.reply.shm is None:
        raise StoreUnavailable("the store does not offer it to this client (another host?)")
    mapping = PoolMapping.attach(means.reply.shm, means.timeout_s)
    return ShmTransport(means.inline, mapping, lease_ms=means.reply.default_lease_ms, verify=means.verify_shm)


def open_tcp(means: Means) -> Plane:
    return means.inline


OPENERS: dict[str, Callable[[Means], Plane]] = {
    "rdma": open_rdma,
    "shm": open_shm,
    "tcp": open_tcp,
}


def check_planes(wanted: Sequence[str]) -> list[str]:
    for name in wanted:
        if name not in OPENERS:
            raise ConfigError(f"unknown plane {name!r}: choose from {', '.join(sorted(OPENERS))}")
    return list(wanted)


def choose_plane(wanted: Sequence[str], means: Means) -> Choice:
    """The first of `wanted` that works. tcp needs nothing but the connection there is, so it always does."""
    reasons: list[str] = []
    for name in wanted:
        if name not in means.reply.planes:
            missing = means.rdma if name == "rdma" and isinstance(means.rdma, str) else ""
            reasons.append(f"{name}: {missing or 'the store does not have it'}")
            continue
        try:
            plane = OPENERS[name](means)
        except StoreUnavailable as error:
            reasons.append(f"{name}: {error}")
            continue
        return Choice(plane, "; ".join(reasons) or "first choice")
    return Choice(means.inline, "; ".join(reasons) or "nothing else was wanted")
