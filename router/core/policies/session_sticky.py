"""All requests of one session on one instance, by rendezvous hashing.

No table to keep or lose: routers agree without talking, and when an instance goes only its own sessions move.
A request without a session goes to the least loaded instance.
"""

from collections.abc import Sequence

import xxhash

from router.core.decision import Choice
from router.core.policies.base import EMPTY_POOL
from router.core.policies.least_loaded import LeastLoaded
from router.core.view import ClusterView, InstanceState, RequestView


class SessionSticky:
    def __init__(self) -> None:
        self._without_session = LeastLoaded()

    def choose(
        self, request: RequestView, pool: Sequence[InstanceState], view: ClusterView, now: float
    ) -> Choice:
        if not pool:
            return EMPTY_POOL
        if not request.session_id:
            return self._without_session.choose(request, pool, view, now)
        seed = xxhash.xxh3_64_intdigest(request.session_id.encode())
        instance = max(pool, key=lambda i: xxhash.xxh3_64_intdigest(i.instance_id.encode(), seed))
        return Choice(instance, "session_sticky")
