"""Connections to peers, made on demand and capped: who may have one, and who loses it (pure).

A network card keeps the state of few queue pairs in its own memory; with more of them every one gets slower.
So there is a cap, and what has not been used for long makes room (SIEVE, as in the paper's section 3.2.3).
"""

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvcore.sieve import Sieve


class EndpointKey(NamedTuple):
    """`peer`: its address. The devices are names of network cards."""

    peer: str
    device: str
    peer_device: str


class Poolable(Protocol):
    """`is_busy`: something is under way on it, so that it cannot be closed now."""

    @property
    def key(self) -> EndpointKey: ...

    @property
    def is_busy(self) -> bool: ...


P = TypeVar("P", bound=Poolable)


class EndpointPool(Generic[P]):
    """At most `capacity` endpoints, one a key, those included that are being made. Closes nothing: what it
    gives up it returns, for the caller to close. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an endpoint pool needs room for at least one endpoint, not {capacity}")
        self.capacity = capacity
        self._order: Sieve[EndpointKey, P] = Sieve()
        self._reserved: set[EndpointKey] = set()

    def get(self, key: EndpointKey) -> P | None:
        """The endpoint, which does not count as used."""
        return self._order.get(key)

    def use(self, key: EndpointKey) -> P | None:
        return self._order.touch(key)

    def reserve(self, key: EndpointKey) -> tuple[bool, P | None]:
        """Whether an endpoint with this key is to be made now, and the one that had to go for it. False: it
        is there, it is being made, or everything is busy."""
        if key in self._order or key in self._reserved:
            return False, None
        victim = None
        if len(self) >= self.capacity:
            victim = self._order.victim(lambda endpoint: not endpoint.is_busy)
            if victim is None:
                return False, None
            self._order.remove(victim.key)
        self._reserved.add(key)
        return True, victim

    def release(self, key: EndpointKey) -> None:
        """What was reserved will not be made."""
        self._reserved.discard(key)

    def add(self, endpoint: P) -> None:
        """LookupError when its key was not reserved."""
        if endpoint.key not in self._reserved:
            raise LookupError(f"no room for an endpoint {endpoint.key}: reserve it first")
        self._reserved.remove(endpoint.key)
        self._order.insert(endpoint.key, endpoint)

    def remove(self, key: EndpointKey) -> P | None:
        return self._order.remove(key)

    def __iter__(self) -> Iterator[P]:
        return self._order.values()

    def __len__(self) -> int:
        return len(self._order) + len(self._reserved)
