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


class RetryPolicy(NamedTuple):
    """`max_attempts`: of one slice, the first included. What failed is avoided for `avoid_s`, then twice
    that, up to `max_avoid_s`."""

    max_attempts: int = 8
    avoid_s: float = 1.0
    max_avoid_s: float = 30.0


class Route(NamedTuple):
    """What slices of one request have in common. Slices of one `family` may travel together."""

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
        self.tried: tuple[EndpointKey, ...] = ()


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
        self._waiting: deque[Slice] = deque()
        self._load_bytes: dict[EndpointKey | str, int] = {}
        self._health: dict[EndpointKey | str, _Health] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, slices: Iterable[Slice]) -> None:
        self._waiting.extend(slices)

    def assign(
        self, now_s: float, room: Callable[[EndpointKey], int], want: Callable[[EndpointKey], None]
    ) -> Run | None:
        """The next run that can go now, or None. `room`: how many slices a path takes at this moment. `want`
        is told of paths that would be used if they had room; asked about each as often as it comes up."""
        for position, first in enumerate(self._waiting):
            path = self._choose(first, now_s, room, want)
            if path is None:
                continue
            fair_share = -(-len(self._waiting) // max(1, len(first.route.tiers[0])))
            run = self._take(position, min(room(path), fair_share))
            self._add_load(path, sum(item.size_bytes for item in run))
            for item in run:
                item.attempts += 1
            return Run(path, run)
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
        given_up = []
        for item in run.slices:
            item.tried = (*item.tried, run.path)
            if all(path in item.tried for tier in item.route.tiers for path in tier):
                item.tried = ()  # another round: a cable may be back
            if item.attempts >= self._policy.max_attempts:
                given_up.append(item)
            else:
                self._waiting.append(item)
        return given_up

    def give_back(self, run: Run) -> None:
        """The run's path was taken from it, through no fault of either: that was no attempt."""
        self._add_load(run.path, -run.size_bytes)
        for item in run.slices:
            item.attempts -= 1
        self._waiting.extendleft(reversed(run.slices))

    def avoid(self, key: EndpointKey | str, now_s: float) -> None:
        """A path or one of our cards, for a while. Failures that were under way when it began count as
        one."""
        health = self._health.setdefault(key, _Health())
        if now_s >= health.until_s:
            health.avoid_s = min(max(self._policy.avoid_s, 2 * health.avoid_s), self._policy.max_avoid_s)
            health.until_s = now_s + health.avoid_s

    def is_avoided(self, path: EndpointKey, now_s: float) -> bool:
        return now_s < self._usable_at(path)

    def drop(self, belongs: Callable[[Slice], bool]) -> list[Slice]:
        """Takes waiting slices out."""
        dropped = [item for item in self._waiting if belongs(item)]
        if dropped:
            self._waiting = deque(item for item in self._waiting if not belongs(item))
        return dropped

    def avoided(self, now_s: float) -> list[str]:
        """What is avoided now, for people to read."""
        return [
            key if isinstance(key, str) else f"{key.device} to {key.peer} {key.peer_device}"
            for key, health in self._health.items()
            if now_s < health.until_s
        ]

    def _choose(
        self,
        item: Slice,
        now_s: float,
        room: Callable[[EndpointKey], int],
        want: Callable[[EndpointKey], None],
    ) -> EndpointKey | None:
        usable = self._usable(item, now_s)
        ready = []
        for path in usable:
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
        return max(
            (self._health[key].until_s for key in (path, path.device) if key in self._health), default=0.0
        )

    def _load_of(self, path: EndpointKey) -> tuple[int, int]:
        return self._load_bytes.get(path.device, 0), self._load_bytes.get(path, 0)

    def _take(self, position: int, count: int) -> tuple[Slice, ...]:
        """`count` slices at most, from `position` on, as long as they belong together."""
        first = self._waiting[position]
        self._waiting.rotate(-position)
        run: list[Slice] = []
        while self._waiting and len(run) < count:
            item = self._waiting[0]
            if item.route.family != first.route.family or item.tried != first.tried:
                break
            run.append(self._waiting.popleft())
        self._waiting.rotate(position)
        return tuple(run)

    def _add_load(self, path: EndpointKey, size_bytes: int) -> None:
        for key in (path, path.device):
            left = self._load_bytes.get(key, 0) + size_bytes
            if left:
                self._load_bytes[key] = left
            else:
                self._load_bytes.pop(key, None)
