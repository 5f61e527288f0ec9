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
    """At most `capacity` endpoints, one a key. Closes nothing: what it gives up it returns, for the
    caller to close. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an endpoint pool needs room for at least one endpoint, not {capacity}")
        self.capacity = capacity
        self._order: Sieve[EndpointKey, P] = Sieve()

    def get(self, key: EndpointKey) -> P | None:
        """The endpoint, which counts as used."""
        return self._order.touch(key)

    def make_room(self) -> tuple[bool, P | None]:
        """Whether one more fits now, and the endpoint that had to go for it."""
        if len(self._order) < self.capacity:
            return True, None
        victim = self._order.victim(lambda endpoint: not endpoint.is_busy)
        if victim is None:
            return False, None
        self._order.remove(victim.key)
        return True, victim

    def add(self, endpoint: P) -> None:
        """After `make_room` said yes. LookupError: there is one with its key already, or no room."""
        if endpoint.key in self._order or len(self._order) >= self.capacity:
            raise LookupError(f"no room for an endpoint {endpoint.key}: ask make_room first")
        self._order.insert(endpoint.key, endpoint)

    def remove(self, key: EndpointKey) -> P | None:
        return self._order.remove(key)

    def of_peer(self, peer: str) -> list[P]:
        return [endpoint for endpoint in self._order.values() if endpoint.key[0] == peer]

    def __iter__(self) -> Iterator[P]:
        return self._order.values()

    def __len__(self) -> int:
        return len(self._order)
