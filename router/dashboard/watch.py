"""What the dashboard keeps between looks at it. Fed with every decision, and about twice a second by the
router's own sweep; on the event loop's thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from router.cluster import Cluster
from router.core.decision import Decision
from router.core.prefix_index import PrefixIndex
from router.core.view import RequestView
from router.dashboard.heat import PrefixHeat
from router.dashboard.history import SAMPLE_INTERVAL_S, Bounds, History, Snapshot
from router.instance_spec import Health
from router.metrics import RouterMetrics


class Watch:
    """`unix_time`: of the wall, for people."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: RouterMetrics,
        index: PrefixIndex | None,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._block_size_tokens = index.block_size_tokens if index is not None else 0
        self._unix_time = unix_time
        self._next_sample_at = 0.0
        self.heat = PrefixHeat()
        self.history = History(Bounds(metrics.ttft.bounds, metrics.tbt.bounds))
        self.started_unix_s = unix_time()
        self._states: dict[str, tuple[str, float]] = {}  # by instance: its state, and since when

    def decided(self, view: RequestView, decision: Decision) -> None:
        """On the path of every request: a microsecond."""
        choice = decision.prefill_choice
        if choice is None or not view.prompt_tokens:
            return
        if decision.reject is None:
            hit_tokens = choice.prefix_blocks * self._block_size_tokens
            self._metrics.prompt_tokens += view.prompt_tokens
            self._metrics.prefix_hit_tokens += min(hit_tokens, view.prompt_tokens)
        if view.block_hashes:
            self.heat.note(view.block_hashes, choice.prefix_blocks)

    def tick(self, now: float) -> None:
        """`now`: the event loop's clock."""
        self._note_states(now)
        if now < self._next_sample_at:
            return
        self._next_sample_at = now + SAMPLE_INTERVAL_S
        self.history.add(self.snapshot(now))
        self.heat.tidy(now)

    def state_since(self, instance_id: str) -> tuple[str, float]:
        """One of up, down, unknown, breaker_open, and since when (Unix seconds)."""
        return self._states.get(instance_id, ("unknown", self._unix_time()))

    def snapshot(self, now: float) -> Snapshot:
        metrics = self._metrics
        states = self._cluster.book.look(now)
        instances = self._cluster.instances.values()
        return Snapshot(
            at=now,
            unix_time_s=self._unix_time(),
            finished=sum(metrics.requests.values()),
            failed=sum(count for (_, status), count in metrics.requests.items() if status >= 500),
            rejected=dict(metrics.rejections),
            ttft_counts=metrics.ttft.counts,
            tbt_counts=metrics.tbt.counts,
            prompt_tokens=metrics.prompt_tokens,
            hit_tokens=metrics.prefix_hit_tokens,
            slo_answers=dict(metrics.slo_answers),
            active_requests=metrics.active_requests,
            queue_ms=max((state.queue_ms(now) for state in states.values()), default=0.0),
            engines_up=sum(instance.health is Health.UP for instance in instances),
            engines=len(instances),
        )

    def _note_states(self, now: float) -> None:
        states = {}
        for instance in self._cluster.instances.values():
            state = instance.health.value
            if instance.health is not Health.DOWN and not instance.breaker.is_closed:
                state = "breaker_open"
            known = self._states.get(instance.url)
            is_same = known is not None and known[0] == state
            states[instance.url] = known if known is not None and is_same else (state, self._unix_time())
        self._states = states
