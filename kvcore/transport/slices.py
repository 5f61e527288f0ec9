"""Requests cut into slices, and which path each slice takes (pure): paper, section 3.2.3.

A path is a pair of network cards, ours and the peer's. Slices go to the least loaded healthy path of the best
tier (cards near both memories first). A slice whose path fails goes to another one. The path, or our card if
it was that, is avoided for a while, longer each time, and then tried again.

Whoever carries the slices asks `assign` for the next run of them, and tells how it ended.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from kvcore.transport.endpoints import EndpointKey

Tiers = tuple[tuple[EndpointKey, ...], ...]
"""Paths that lead there, best first; within a tier none is better than another."""


Tried = tuple[EndpointKey, ...]


class RetryPolicy(NamedTuple):
    """`max_attempts`: of one slice, the first included. What failed is avoided for `avoid_s`, then twice
    that, up to `max_avoid_s`."""

    max_attempts: int = 8
    avoid_s: float = 1.0
    max_avoid_s: float = 30.0


class Route(NamedTuple):
    """What slices of one request have in common. Slices of one `family` have the same tiers and may travel
    together."""

    family: Hashable
    tiers: Tiers


class Slice:
    """`size_bytes` at `offset` of `request` (whatever the carrier wants to find again)."""

    __slots__ = ("attempts", "offset", "request", "route", "size_bytes", "tried")

    def __init__(self, request: Hashable, route: Route, offset: int, size_bytes: int) -> None:
        self.request = request
        self.route = route
        self.offset = offset
        self.size_bytes = size_bytes
        self.attempts = 0
        self.tried: Tried = ()


class Run(NamedTuple):
    """Slices of one family that go over one path together."""

    path: EndpointKey
    slices: tuple[Slice, ...]

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.slices)


def cut(request: Hashable, route: Route, length_bytes: int, slice_bytes: int) -> list[Slice]:
    """Equal slices, but for the last, which also takes a rest of less than half a slice."""
    count = max(1, (length_bytes + slice_bytes // 2) // slice_bytes)
    starts = range(0, count * slice_bytes, slice_bytes)
    ends = [*starts[1:], length_bytes]
    return [Slice(request, route, begin, end - begin) for begin, end in zip(starts, ends, strict=True)]


class _Health:
    """Of a path or a card."""

    __slots__ = ("avoid_s", "until_s")

    def __init__(self) -> None:
        self.avoid_s = 0.0
        self.until_s = 0.0


class Spreader:
    """All slices that wait, to all peers, and what is known of paths. Not thread-safe; times are in seconds
    of any one clock."""

    def __init__(self, policy: RetryPolicy | None = None) -> None:
        self._policy = policy or RetryPolicy()
        # By what decides about their path, so that one look is enough for all that wait for the same.
        self._waiting: dict[tuple[Hashable, Tried], deque[Slice]] = {}
        self._load_bytes: dict[EndpointKey | str, int] = {}
        self._health: dict[EndpointKey | str, _Health] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, slices: Iterable[Slice]) -> None:
        for item in slices:
            self._waiting.setdefault((item.route.family, item.tried), deque()).append(item)

    def assign(
        self, now_s: float, room: Callable[[EndpointKey], int], want: Callable[[EndpointKey], None]
    ) -> Run | None:
        """The next run that can go now, or None. `room`: how many slices a path takes at this moment. `want`
        is told of paths that would be used if they had room, as often as that comes up."""
        for group, slices in self._waiting.items():
            path = self._choose(slices[0], now_s, room, want)
            if path is None:
                continue
            fair_share = -(-len(slices) // max(1, len(slices[0].route.tiers[0])))
            count = min(room(path), fair_share)
            run = Run(path, tuple(slices.popleft() for _ in range(count)))
            if not slices:
                del self._waiting[group]
            self._add_load(path, run.size_bytes)
            for item in run.slices:
                item.attempts += 1
            return run
        return None

    def done(self, run: Run) -> None:
        self._add_load(run.path, -run.size_bytes)
        for key in (run.path, run.path.device):
            self._health.pop(key, None)

    def failed(self, run: Run, now_s: float, *, own_card: bool) -> list[Slice]:
        """The slices wait for another path, except those returned, which have failed often enough.
        `own_card`: it is our card that does not work, so that none of its paths will."""
        self._add_load(run.path, -run.size_bytes)
        self.avoid(run.path.device if own_card else run.path, now_s)
        return self._try_elsewhere(run.slices, run.path)

    def refused(self, path: EndpointKey, now_s: float, *, own_card: bool) -> list[Slice]:
        """The path could not even be made: an attempt for all that might have taken it. As `failed`."""
        self.avoid(path.device if own_card else path, now_s)
        return self._try_elsewhere(
            self.drop(
                lambda item: path not in item.tried and any(path in tier for tier in item.route.tiers),
                is_attempt=True,
            ),
            path,
        )

    def give_back(self, run: Run) -> None:
        """The run's path was taken from it, through no fault of either: that was no attempt."""
        self._add_load(run.path, -run.size_bytes)
        for item in reversed(run.slices):
            item.attempts -= 1
            self._waiting.setdefault((item.route.family, item.tried), deque()).appendleft(item)

    def avoid(self, key: EndpointKey | str, now_s: float) -> None:
        """A path or one of our cards, for a while. Failures that were under way when it began count as
        one."""
        health = self._health.setdefault(key, _Health())
        if now_s >= health.until_s:
            health.avoid_s = min(max(self._policy.avoid_s, 2 * health.avoid_s), self._policy.max_avoid_s)
            health.until_s = now_s + health.avoid_s

    def is_avoided(self, path: EndpointKey, now_s: float) -> bool:
        return now_s < self._usable_at(path)

    def avoided(self, now_s: float) -> list[str]:
        """What is avoided now, for people to read."""
        return [
            key if isinstance(key, str) else f"{key.device} to {key.peer} {key.peer_device}"
            for key, health in self._health.items()
            if now_s < health.until_s
        ]

    def drop(self, belongs: Callable[[Slice], bool], *, is_attempt: bool = False) -> list[Slice]:
        """Takes waiting slices out."""
        dropped: list[Slice] = []
        for group, slices in list(self._waiting.items()):
            kept: deque[Slice] = deque()
            for item in slices:
                (dropped if belongs(item) else kept).append(item)
            if kept:
                self._waiting[group] = kept
            else:
                del self._waiting[group]
        for item in dropped:
            item.attempts += is_attempt
        return dropped

    def _try_elsewhere(self, slices: Iterable[Slice], path: EndpointKey) -> list[Slice]:
        given_up = []
        for item in slices:
            item.tried = (*item.tried, path)
            if all(known in item.tried for tier in item.route.tiers for known in tier):
                item.tried = ()  # another round: a cable may be back
            if item.attempts >= self._policy.max_attempts:
                given_up.append(item)
            else:
                self.add([item])
        return given_up

    def _choose(
        self,
        item: Slice,
        now_s: float,
        room: Callable[[EndpointKey], int],
        want: Callable[[EndpointKey], None],
    ) -> EndpointKey | None:
        ready = []
        for path in self._usable(item, now_s):
            if room(path) > 0:
                ready.append(path)
            else:
                want(path)
        return min(ready, key=self._load_of, default=None)

    def _usable(self, item: Slice, now_s: float) -> Sequence[EndpointKey]:
        """Healthy and untried paths of the best tier that has one; when there is none, the one whose time of
        being avoided ends first: better a bad chance than none."""
        untried = [[path for path in tier if path not in item.tried] for tier in item.route.tiers]
        for tier in untried:
            if healthy := [path for path in tier if not self.is_avoided(path, now_s)]:
                return healthy
        left = [path for tier in untried for path in tier]
        return [min(left, key=self._usable_at)] if left else []

    def _usable_at(self, path: EndpointKey) -> float:
        if not self._health:
            return 0.0
        return max(
            (self._health[key].until_s for key in (path, path.device) if key in self._health), default=0.0
        )

    def _load_of(self, path: EndpointKey) -> tuple[int, int]:
        return self._load_bytes.get(path.device, 0), self._load_bytes.get(path, 0)

    def _add_load(self, path: EndpointKey, size_bytes: int) -> None:
        for key in (path, path.device):
            left = self._load_bytes.get(key, 0) + size_bytes
            if left:
                self._load_bytes[key] = left
            else:
                self._load_bytes.pop(key, None)
