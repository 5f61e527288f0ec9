"""The network cards of this process: an open device each, and the queues its completions come to."""

import logging
from collections.abc import Iterable

from kvcore.transport.verbs import (
    Binding,
    CompletionQueue,
    PathOptions,
    QueuePair,
    QueuePairAddress,
    RdmaUnavailable,
)

logger = logging.getLogger(__name__)

# Nothing is posted on the queue pairs that peers use; their errors make no completions either.
_PASSIVE_COMPLETIONS = 16


class Card:
    """`completions` are those of our own requests; only the worker's thread touches them. Everything else may
    be used from any thread."""

    def __init__(
        self, binding: Binding, name: str, *, max_requests: int, max_endpoints: int, options: PathOptions
    ) -> None:
        self.name = name
        self.device = binding.open(name)
        self._binding = binding
        self.max_requests = max_requests
        self.sent_bytes = 0
        self._options = options
        self.completions: CompletionQueue = self.device.completion_queue(max_requests * max_endpoints)
        self._passive: CompletionQueue = self.device.completion_queue(_PASSIVE_COMPLETIONS)

    def active_pair(self) -> QueuePair:
        """A fresh queue pair for our requests."""
        return self.device.queue_pair(self.completions, max_requests=self.max_requests)

    def connect(self, pair: QueuePair, peer: QueuePairAddress) -> None:
        pair.connect(peer, self._options)

    def accept(self, peer: QueuePairAddress) -> QueuePair:
        """A queue pair through which the peer reads and writes what is registered. RdmaUnavailable:
        refused."""
        pair = self.device.queue_pair(self._passive, max_requests=1, remote_access=True)
        try:
            pair.connect(peer, self._options)
        except RdmaUnavailable:
            pair.close()
            raise
        return pair

    def is_active(self) -> bool:
        """Whether its port is up."""
        return self._binding.is_active(self.name)

    def close(self) -> None:
        self.completions.close()
        self._passive.close()
        self.device.close()


def open_cards(
    binding: Binding, names: Iterable[str], *, max_requests: int, max_endpoints: int, options: PathOptions
) -> dict[str, Card]:
    """Those that can be opened; RdmaUnavailable when none can."""
    cards: dict[str, Card] = {}
    reasons = []
    for name in names:
        try:
            cards[name] = Card(
                binding, name, max_requests=max_requests, max_endpoints=max_endpoints, options=options
            )
        except RdmaUnavailable as error:
            logger.warning("RDMA device %s is left out: %s", name, error)
            reasons.append(str(error))
    if not cards:
        raise RdmaUnavailable("; ".join(reasons) or "no RDMA device is active")
    return cards
