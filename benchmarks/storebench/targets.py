"""What we want to be true of the ratios, as data, and whether it is. Pure; never asserted by tests."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from storebench.plan import BATCH_KEYS, KIB, MANY_CLIENTS, MIB, SIZES_BYTES
from storebench.stats import Figure, speedup


class Target(NamedTuple):
    """`ours` should be at least `wanted_ratio` times as fast as `peer` at all these sizes."""

    ours: str
    op: str
    sizes_bytes: tuple[int, ...]
    num_keys: int
    num_clients: int
    peer: str
    wanted_ratio: float


class Verdict(NamedTuple):
    ours: str
    what: str
    size_bytes: int
    peer: str
    ratio: float
    wanted_ratio: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.wanted_ratio


def _from(size_bytes: int) -> tuple[int, ...]:
    return tuple(size for size in SIZES_BYTES if size >= size_bytes)


TARGETS = (
    *(Target("ours-tcp", op, _from(64 * KIB), 1, 1, "mooncake-tcp", 1.5) for op in ("put", "get")),
    *(Target("ours-tcp", op, _from(1 * MIB), 1, 1, "raw-tcp", 0.85) for op in ("put", "get")),
    *(Target("ours-tcp", op, (4 * KIB,), BATCH_KEYS, 1, "mooncake-tcp", 4.0) for op in ("put", "get")),
    *(Target("ours-tcp", op, (1 * MIB,), 1, MANY_CLIENTS, "mooncake-tcp", 2.5) for op in ("put", "get")),
    Target("ours-shm", "get", _from(256 * KIB), 1, 1, "mooncake-tcp", 2.0),
    Target("ours-shm", "get", _from(256 * KIB), 1, 1, "mooncake-shm", 1.2),
    *(Target(ours, "get", (4 * KIB,), 1, 1, "mooncake-tcp", 1 / 0.4) for ours in ("ours-tcp", "ours-shm")),
    Target("ours-tcp", "exists", (4 * KIB,), 128, 1, "mooncake-tcp", 1 / 0.3),
    # Checksums may cost a fifth of a get: with them it takes at most 1.2 times as long as without.
    Target("ours-tcp", "get", _from(1 * MIB), 1, 1, "ours-tcp-nosum", 1 / 1.2),
)


def judge(figures: Sequence[Figure], targets: Iterable[Target] = TARGETS) -> Iterator[Verdict]:
    """One verdict per target and size for which both systems were measured."""
    found = {(f.system, f.op, f.size_bytes, f.num_keys, f.num_clients): f for f in figures}
    for target in targets:
        for size_bytes in target.sizes_bytes:
            cell = (target.op, size_bytes, target.num_keys, target.num_clients)
            ours, peer = found.get((target.ours, *cell)), found.get((target.peer, *cell))
            if ours is None or peer is None:
                continue
            yield Verdict(
                ours=target.ours,
                what=_what(target),
                size_bytes=size_bytes,
                peer=target.peer,
                ratio=speedup(ours, peer),
                wanted_ratio=target.wanted_ratio,
            )


def _what(target: Target) -> str:
    keys = f" of {target.num_keys} keys" if target.num_keys > 1 else ""
    clients = f", {target.num_clients} clients" if target.num_clients > 1 else ""
    return f"{target.op}{keys}{clients}"
