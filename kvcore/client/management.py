"""What a StoreClient asks for besides moving bytes: what is there, pins, removal, prefetching, numbers."""

import logging
import time
from collections.abc import Sequence

from kvcore.client.counters import TIMEOUTS_TOTAL, UNAVAILABLE_TOTAL, Counters
from kvcore.client.link import LinkKeeper
from kvcore.client.names import key_runs, key_runs_with_parents, named_all
from kvcore.client.replicas import after_dropping, with_status_ok
from kvcore.transport.base import Transfer
from kvcore.transport.channel import Outcome
from kvcore.transport.parts import (
    FinishedTransfer,
    PartsTransfer,
    StatusPart,
    are_found,
    statuses_of,
)
from kvcore.wire import messages as m
from kvcore.wire.messages import EvictStrategy, KeyInfo, Message, PinKind, Status, Tier

logger = logging.getLogger(__name__)


class Management:
    """The part of StoreClient that needs nothing but questions and answers. Thread-safe; nothing here raises
    for what the store or the network does."""

    def __init__(self, keeper: LinkKeeper, counters: Counters, timeout_s: float) -> None:
        self._keeper = keeper
        self._counters = counters
        self._timeout_s = timeout_s

    def exists(self, key: str | bytes) -> bool:
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[str | bytes], *, timeout_ms: float | None = None) -> list[bool]:
        deadline = self._deadline(timeout_ms)
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        found: list[bool] = []
        for run in key_runs(named_all(keys), max_keys):
            outcome = self._ask(m.Exists, run, deadline=deadline)
            if isinstance(outcome, m.StatusReply) and len(outcome.statuses) == len(run):
                found += are_found(outcome.statuses)
            else:
                found += [False] * len(run)
        return found

    def batch_status(self, keys: Sequence[str | bytes]) -> list[Status]:
        """As batch_exists, but says more: OK, PENDING (being written), MISSING, or why there is no answer."""
        return self._ask_statuses(m.Exists, keys)

    def get_size(self, key: str | bytes) -> int:
        """Bytes of a whole object; -1 for one that is not there or not written to its end."""
        (info,) = self.describe([key])
        return info.size_bytes if info is not None and info.layers_ready == info.num_layers else -1

    def describe(self, keys: Sequence[str | bytes]) -> list[KeyInfo | None]:
        """Size, layers, tier, pin and leases of each; None for what is not there. Takes no lease and is no
        use of the object."""
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        infos: list[KeyInfo | None] = []
        for run in key_runs(named_all(keys), max_keys):
            outcome = self._ask(m.Describe, run)
            if isinstance(outcome, m.DescribeReply) and len(outcome.infos) == len(run):
                infos += [info if info.tier != Tier.NONE else None for info in outcome.infos]
            else:
                infos += [None] * len(run)
        return infos

    def prefetch(self, keys: Sequence[str | bytes], tier: Tier = Tier.DRAM) -> Transfer:
        """Has objects from slower levels brought to DRAM (or, with `tier`, copied to that level); returns at
        once. Its `wait` tells for each key OK (it is there), MISSING (it is nowhere), FULL (there is no room
        for it), or TIMED_OUT / PENDING (it comes all the same). More than DRAM can hold does not push itself
        out: what came first stays."""
        names = named_all(keys)
        link = self._keeper.current()
        if link is None:
            self._counters.add(UNAVAILABLE_TOTAL)
            return FinishedTransfer([Status.UNAVAILABLE] * len(names))
        parts: list[StatusPart] = []
        first = 0
        for run in key_runs(names, link.connection.max_keys):
            kind, fields = prefetching(run, tier, self._timeout_s)
            call = link.connection.start(kind, fields, stall_s=self._timeout_s)
            parts.append(StatusPart(call, range(first, first + len(run)), [0] * len(run)))
            first += len(run)
        statuses = [Status.INVALID] * len(names)
        return PartsTransfer(link.connection, parts, statuses, self._timeout_s, _not_counted)

    def remove(self, key: str | bytes, *, force: bool = False) -> Status:
        return self.batch_remove([key], force=force)[0]

    def batch_remove(self, keys: Sequence[str | bytes], *, force: bool = False) -> list[Status]:
        self._settle()
        return self._ask_statuses(m.Remove, keys, force)

    def pin(self, key: str | bytes, kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000) -> Status:
        return self.batch_pin([key], kind, ttl_ms=ttl_ms)[0]

    def batch_pin(
        self, keys: Sequence[str | bytes], kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000
    ) -> list[Status]:
        return self._ask_statuses(m.Pin, keys, int(kind), ttl_ms)

    def unpin(self, key: str | bytes) -> Status:
        return self.batch_unpin([key])[0]

    def batch_unpin(self, keys: Sequence[str | bytes]) -> list[Status]:
        return self._ask_statuses(m.Unpin, keys)

    def change_replica(
        self,
        keys: Sequence[str | bytes],
        *,
        add: Tier | None = None,
        drop: Tier | None = None,
        wait_ms: int = 0,
    ) -> list[Status]:
        """Which levels of the store hold a copy: one is added, or dropped, or both in this order. `wait_ms`
        bounds the wait for the copy to be made; PENDING: it is being made. Statuses as m.ChangeReplica tells
        them; when a copy could not be added, none is dropped. See `KeyInfo.copies`."""
        names = named_all(keys)
        added = [Status.OK] * len(names) if add is None else self._change(names, add, True, wait_ms)
        if drop is None:
            return added
        return after_dropping(added, self._change(with_status_ok(names, added), drop, False, 0))

    def copy_from(
        self,
        keys: Sequence[str | bytes],
        source: str,
        *,
        parents: Sequence[bytes] = (),
        wait_ms: int = 0,
    ) -> list[Status]:
        """Has the store copy objects from the one at `source`, an address as it reaches it; statuses as
        m.CopyFrom tells them. `wait_ms` bounds the wait, not the copying; `parents` are as in `reserve`."""
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        statuses: list[Status] = []
        for run, run_parents in key_runs_with_parents(named_all(keys), parents, max_keys):
            deadline = self._deadline(self._timeout_s * 1e3 + wait_ms)
            outcome = self._ask(m.CopyFrom, run, source, run_parents, wait_ms, deadline=deadline)
            statuses += statuses_of(outcome, len(run))
        return statuses

    def _change(self, names: list[bytes], tier: Tier, is_wanted: bool, wait_ms: int) -> list[Status]:
        timeout_ms = self._timeout_s * 1e3 + wait_ms
        return self._ask_statuses(
            m.ChangeReplica, names, int(tier), is_wanted, wait_ms, timeout_ms=timeout_ms
        )

    def evict(self, size_bytes: int = 0, strategy: EvictStrategy = EvictStrategy.SAVE) -> tuple[int, int]:
        """Has the store make that many bytes of DRAM free (0: all it can), in its policy's order: (objects,
        bytes). `strategy`: SAVE what no lower level has yet, or take only what has COPIES there, or DISCARD.
        Without lower levels what goes is gone."""
        self._settle()
        outcome = self._ask(m.Evict, size_bytes, int(strategy))
        return (outcome.num_objects, outcome.size_bytes) if isinstance(outcome, m.EvictReply) else (0, 0)

    def list_keys(self, cursor: int = 0, limit: int = 1000) -> tuple[list[KeyInfo], int]:
        outcome = self._ask(m.ListKeys, cursor, limit)
        return (outcome.keys, outcome.next_cursor) if isinstance(outcome, m.ListKeysReply) else ([], 0)

    def stats(self) -> dict[str, float]:
        """The store's own numbers (kvcore/metrics.py); empty when it cannot be asked."""
        outcome = self._ask(m.Stats)
        return outcome.values if isinstance(outcome, m.StatsReply) else {}

    def drain(self, *, stop: bool = False) -> m.DrainReply | None:
        """Takes no new objects and saves DRAM to SSD; ask again for how far it is. None: no answer."""
        outcome = self._ask(m.Drain, stop)
        return outcome if isinstance(outcome, m.DrainReply) else None

    def verify(
        self, *, start: bool = False, remote_bytes_per_s: int = m.REMOTE_CHECK_BYTES_PER_S
    ) -> m.VerifyReply | None:
        """Has every checksum checked (`start`), on the remote not faster than that (0: not there); ask again
        for how far it is. None: no answer."""
        outcome = self._ask(m.Verify, start, remote_bytes_per_s)
        return outcome if isinstance(outcome, m.VerifyReply) else None

    # ---- inside ----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        link = self._keeper.current()
        if link is not None:
            link.plane.settle()

    def _ask(self, kind: type[Message], *fields: object, deadline: float | None = None) -> Outcome:
        link = self._keeper.current()
        if link is None:
            self._counters.add(UNAVAILABLE_TOTAL)
            return Status.UNAVAILABLE
        outcome = link.connection.ask(kind, fields, self._deadline(None) if deadline is None else deadline)
        if isinstance(outcome, Status | m.ErrorReply):
            self._count_failure(outcome)
        return outcome

    def _ask_statuses(
        self,
        kind: type[Message],
        keys: Sequence[str | bytes],
        *fields: object,
        timeout_ms: float | None = None,
    ) -> list[Status]:
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        statuses: list[Status] = []
        for run in key_runs(named_all(keys), max_keys):
            outcome = self._ask(kind, run, *fields, deadline=self._deadline(timeout_ms))
            statuses += statuses_of(outcome, len(run))
        return statuses

    def _deadline(self, timeout_ms: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_ms is None else timeout_ms / 1e3)

    def _count_failure(self, outcome: Outcome) -> None:
        if isinstance(outcome, m.ErrorReply):
            logger.warning("the store refused a request: %s", outcome.message)
        self._counters.add(TIMEOUTS_TOTAL if outcome is Status.TIMED_OUT else UNAVAILABLE_TOTAL)


def prefetching(keys: list[bytes], tier: Tier, timeout_s: float) -> tuple[type[Message], tuple[object, ...]]:
    """The request that brings objects to a tier: for DRAM an Await that waits for no writer, and so for the
    slower levels alone."""
    if tier is Tier.DRAM:
        return m.Await, (keys, 0, 0)
    return m.ChangeReplica, (keys, int(tier), True, int(timeout_s * 800))


def _not_counted(statuses: Sequence[Status], moved_bytes: int) -> None:
    """A prefetch is neither a hit nor a miss of this client."""
