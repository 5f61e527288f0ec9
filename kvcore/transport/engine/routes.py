"""Which paths lead from memory here to memory at a peer, best first (pure)."""

from collections.abc import Iterator, Sequence

from kvcore.transport.endpoints import EndpointKey
from kvcore.transport.engine.batch import Segment
from kvcore.transport.engine.memory import LocalMemory
from kvcore.transport.engine.messages import RemoteMemory
from kvcore.transport.engine.tcp_path import TCP
from kvcore.transport.slices import Tiers
from kvcore.transport.topology import Matrix, cards_for


def tiers_between(
    matrix: Matrix, local: LocalMemory, segment: Segment, remote: RemoteMemory, *, with_tcp: bool
) -> Tiers:
    """First the cards near both memories, paired in order: servers are wired alike, the n-th card of each to
    the n-th switch. Then other pairs of near cards, then all the rest, at last TCP."""
    mine, theirs = cards_for(matrix, local.place), cards_for(segment.matrix, remote.place)
    near = [name for name in mine.preferred if name in local.regions]
    far = [name for name in mine.others if name in local.regions]
    near_there = [name for name in theirs.preferred if name in remote.keys]
    far_there = [name for name in theirs.others if name in remote.keys]
    pairs = [
        list(_in_order(near, near_there)),
        list(_all(near, near_there)),
        list(_all([*near, *far], [*near_there, *far_there])),
    ]
    if with_tcp and segment.takes_tcp and local.is_host and remote.is_host:
        pairs.append([(TCP, TCP)])
    seen: set[tuple[str, str]] = set()
    tiers = []
    for tier in pairs:
        fresh = [pair for pair in dict.fromkeys(tier) if pair not in seen]
        seen.update(fresh)
        if fresh:
            tiers.append(tuple(EndpointKey(segment.address, *pair) for pair in fresh))
    return tuple(tiers)


def _in_order(mine: Sequence[str], theirs: Sequence[str]) -> Iterator[tuple[str, str]]:
    if mine and theirs:
        for number in range(max(len(mine), len(theirs))):
            yield mine[number % len(mine)], theirs[number % len(theirs)]


def _all(mine: Sequence[str], theirs: Sequence[str]) -> Iterator[tuple[str, str]]:
    return ((one, other) for one in mine for other in theirs)
