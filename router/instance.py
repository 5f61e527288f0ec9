"""One engine as the shell knows it: its connections, our load on it, its health."""

from router.breaker import Breaker, BreakerConfig
from router.http.upstream import UpstreamPool
from router.instance_spec import Health, InstanceSpec


class Instance:
    """`in_flight` counts our legs on it; `draining` ones get no new requests. `is_offered`: what the book
    was told last of its availability. `head_lines` begin the head of each request to it."""

    def __init__(self, spec: InstanceSpec, pool: UpstreamPool, breaker: BreakerConfig) -> None:
        self.spec = spec
        self.url = spec.url
        self.role = spec.role
        self.role_name = spec.role.value  # an enum computes it each time
        self.pool = pool
        self.head_lines = pool.host_line + spec.rank_lines
        self.breaker = Breaker(breaker)
        self.in_flight = 0
        self.health = Health.UNKNOWN
        self.health_detail = ""
        self.draining = False
        self.is_offered = True

    def is_available(self, now: float) -> bool:
        breaker = self.breaker
        return (
            self.health is not Health.DOWN
            and not self.draining
            and (breaker.is_closed or breaker.admits(now, self.in_flight))
        )
