"""Who is served next when requests must wait: priority first, then fairness between tenants.

Within one priority it is the Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024): the tenant that has been served the fewest tokens, by weight, goes next. A tenant that comes back
starts at the level of those waiting, so idling earns no credit. Requests of one tenant keep their order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from router.core.decision import MIN_RETRY_AFTER_MS, Rejection, RejectReason
from router.core.view import RequestView

# What one output token counts against one prompt token (VTC's w_q / w_p).
OUTPUT_TOKEN_WEIGHT = 2.0


MAX_TENANTS = 4096


class _Waiting(msgspec.Struct):
    request: RequestView
    since: float


class FairQueue:
    """`weights`: shares of tenants, 1.0 where none is given. `max_wait_ms` 0: no limit."""

    def __init__(
        self, max_requests: int, max_wait_ms: float, weights: Mapping[str, float] | None = None
    ) -> None:
        self._max_requests = max_requests
        self._max_wait_ms = max_wait_ms
        self._weights = weights or {}
        self._lanes: dict[tuple[int, str], OrderedDict[str, _Waiting]] = {}
        self._lane_of: dict[str, tuple[int, str]] = {}
        self._served: OrderedDict[str, float] = OrderedDict()
        self._level = 0.0  # of the tenant served last

    def __len__(self) -> int:
        return len(self._lane_of)

    @property
    def num_tenants(self) -> int:
        """Tenants whose account is kept."""
        return len(self._served)

    def push(self, request: RequestView, now: float) -> Rejection | None:
        """QUEUE_FULL when there is no room. Request ids must be unique among those waiting."""
        if len(self) >= self._max_requests:
            return Rejection(
                RejectReason.QUEUE_FULL, MIN_RETRY_AFTER_MS, float(len(self)), float(self._max_requests)
            )
        waiting = {tenant for _, tenant in self._lanes}
        if request.tenant not in waiting:
            floor = min((self._served[tenant] for tenant in waiting), default=self._level)
            self._served[request.tenant] = max(self._served.get(request.tenant, 0.0), floor)
        key = (request.priority, request.tenant)
        self._lanes.setdefault(key, OrderedDict())[request.request_id] = _Waiting(request, now)
        self._lane_of[request.request_id] = key
        return None

    def pop(self) -> RequestView | None:
        """The next to serve, charged with its prompt; None when nobody waits."""
        if not self._lanes:
            return None
        key = min(self._lanes, key=lambda lane: (lane[0], self._served[lane[1]]))
        request = next(iter(self._lanes[key].values())).request
        self.cancel(request.request_id)
        self.charge(request.tenant, request.prompt_tokens)
        self._level = self._served[request.tenant]
        return request

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Tokens served to a tenant outside of `pop`: output, and requests that did not have to wait."""
        tokens = prompt_tokens + OUTPUT_TOKEN_WEIGHT * output_tokens
        served = self._served.get(tenant, self._level) + tokens / self._weights.get(tenant, 1.0)
        self._served[tenant] = served
        self._served.move_to_end(tenant)
        if len(self._served) > MAX_TENANTS:
            waiting = {name for _, name in self._lanes}
            forgotten = next((name for name in self._served if name not in waiting), None)
            if forgotten is not None:
                del self._served[forgotten]

    def cancel(self, request_id: str) -> bool:
        """The client left. False when it was not waiting."""
        key = self._lane_of.pop(request_id, None)
        if key is None:
            return False
        lane = self._lanes[key]
        del lane[request_id]
        if not lane:
            del self._lanes[key]
        return True

    def expired(self, now: float) -> list[tuple[RequestView, Rejection]]:
        """Takes out those that have waited too long."""
        found: list[tuple[RequestView, Rejection]] = []
        if not self._max_wait_ms:
            return found
        for lane in list(self._lanes.values()):
            for waiting in list(lane.values()):
                waited_ms = (now - waiting.since) * 1e3
                if waited_ms < self._max_wait_ms:
                    break
                self.cancel(waiting.request.request_id)
                rejection = Rejection(
                    RejectReason.QUEUE_TIMEOUT, MIN_RETRY_AFTER_MS, waited_ms, self._max_wait_ms
                )
                found.append((waiting.request, rejection))
        return found
