"""Transfers that share network cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsim.agenda import Agenda


class Link:
    """One direction of one node's NICs."""

    __slots__ = ("bytes_per_s", "flows", "sent_bytes")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}
        self.sent_bytes = 0.0


class Flow:
    __slots__ = ("done", "due_at", "links", "rate", "remaining_bytes", "updated_at")

    def __init__(self, links: Sequence[Link], size_bytes: float, done: Callable[[float], None]) -> None:
        self.links = links
        self.remaining_bytes = size_bytes
        self.done = done
        self.rate = 0.0
        self.updated_at = 0.0
        self.due_at = 0.0


class Network:
    """Each link is divided equally among its flows; a flow gets the least of its links' shares.

    Not max-min fairness (what a flow cannot use on one link, others there do not get), so congestion is a
    little overstated, never understated.
    """

    def __init__(self, agenda: Agenda, latency_ms: float) -> None:
        self._agenda = agenda
        self._latency_s = latency_ms / 1e3

    def send(self, links: Sequence[Link], size_bytes: float, done: Callable[[float], None]) -> None:
        """`done` is called with the time when the last byte has arrived."""
        now = self._agenda.now
        flow = Flow(links, size_bytes, done)
        flow.updated_at = now
        for link in links:
            link.flows[flow] = None
            link.sent_bytes += size_bytes
        self._share(links, now)

    def _share(self, links: Sequence[Link], now: float) -> None:
        affected = links[0].flows if len(links) == 1 else {f: None for link in links for f in link.flows}
        for flow in affected:
            rate = min(link.bytes_per_s / len(link.flows) for link in flow.links)
            if rate == flow.rate:
                continue
            flow.remaining_bytes -= (now - flow.updated_at) * flow.rate
            flow.updated_at = now
            flow.rate = rate
            flow.due_at = now + max(flow.remaining_bytes, 0.0) / rate
            self._agenda.at(flow.due_at, lambda then, f=flow: self._finish(f, then))  # type: ignore[misc]

    def _finish(self, flow: Flow, now: float) -> None:
        # Its rate has changed since this was planned, or it is done already.
        if flow.due_at > now or flow not in flow.links[0].flows:
            return
        for link in flow.links:
            del link.flows[flow]
        self._share(flow.links, now)
        self._agenda.at(now + self._latency_s, flow.done)
