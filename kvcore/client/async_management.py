"""What an AsyncStoreClient asks for besides bytes: what is there, pins, removal, prefetching, numbers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvcore.client.link import DEFAULT_TIMEOUT_MS
from kvcore.client.names import key_runs, key_runs_with_parents, named_all
from kvcore.client.replicas import after_dropping, with_status_ok
from kvcore.transport.channel import Outcome
from kvcore.transport.parts import statuses_of
from kvcore.wire import messages as m
from kvcore.wire.messages import EvictStrategy, KeyInfo, Message, PinKind, Status, Tier

_PREFETCH_WAIT_MS = 4_000  # less than a client waits for an answer


class AsyncManagement(ABC):
    """The same calls as kvcore.client.management.Management, from the client's loop."""

    @property
    @abstractmethod
    def _max_keys(self) -> int | None:
        """How many keys one message may name; None without a store."""

    @abstractmethod
    async def _ask(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        timeout_ms: float | None = None,
        payload: Sequence[memoryview] = (),
    ) -> tuple[Outcome, bytearray]: ...

    async def exists(self, key: str | bytes) -> bool:
        return (await self.batch_exists([key]))[0]

    async def batch_exists(self, keys: Sequence[str | bytes]) -> list[bool]:
        return [status is Status.OK for status in await self.batch_status(keys)]

    async def batch_status(self, keys: Sequence[str | bytes]) -> list[Status]:
        """OK, PENDING (being written), MISSING, or why there is no answer."""
        return await self._ask_statuses(m.Exists, keys)

    async def get_size(self, key: str | bytes) -> int:
        """Bytes of a whole object; -1 for one that is not there or not written to its end."""
        (info,) = await self.describe([key])
        return info.size_bytes if info is not None and info.layers_ready == info.num_layers else -1

    async def describe(self, keys: Sequence[str | bytes]) -> list[KeyInfo | None]:
        """Size, layers, tier, pin and leases of each; None for what is not there."""
        infos: list[KeyInfo | None] = []
        for run in key_runs(named_all(keys), self._max_keys or len(keys) or 1):
            outcome, _ = await self._ask(m.Describe, (run,))
            if isinstance(outcome, m.DescribeReply) and len(outcome.infos) == len(run):
                infos += [info if info.tier != Tier.NONE else None for info in outcome.infos]
            else:
                infos += [None] * len(run)
        return infos

    async def prefetch(self, keys: Sequence[str | bytes], tier: Tier = Tier.DRAM) -> list[Status]:
        """Has objects from slower levels brought to DRAM, or to `tier`, and waits for it; make it a task to
        go on meanwhile. Results as those of the blocking client."""
        if tier is Tier.DRAM:
            return await self._ask_statuses(m.Await, keys, 0, 0)
        return await self.change_replica(keys, add=tier, wait_ms=_PREFETCH_WAIT_MS)

    async def resolve(self, block_hashes: Sequence[int]) -> list[bytes]:
        """Keys of the blocks that the store's KV events name so; those it does not have are left out."""
        outcome, _ = await self._ask(m.Resolve, (list(block_hashes),))
        return list(outcome.keys) if isinstance(outcome, m.ResolveReply) else []

    async def copy_from(
        self,
        keys: Sequence[str | bytes],
        source: str,
        *,
        parents: Sequence[bytes] = (),
        wait_ms: int = 0,
    ) -> list[Status]:
        """As that of the blocking client."""
        statuses: list[Status] = []
        timeout_ms = wait_ms + DEFAULT_TIMEOUT_MS
        max_keys = self._max_keys or len(keys) or 1
        for run, run_parents in key_runs_with_parents(named_all(keys), parents, max_keys):
            outcome, _ = await self._ask(m.CopyFrom, (run, source, run_parents, wait_ms), timeout_ms)
            statuses += statuses_of(outcome, len(run))
        return statuses

    async def change_replica(
        self,
        keys: Sequence[str | bytes],
        *,
        add: Tier | None = None,
        drop: Tier | None = None,
        wait_ms: int = 0,
    ) -> list[Status]:
        """As that of the blocking client."""
        names = named_all(keys)
        added = [Status.OK] * len(names) if add is None else await self._change(names, add, True, wait_ms)
        if drop is None:
            return added
        return after_dropping(added, await self._change(with_status_ok(names, added), drop, False, 0))

    async def _change(self, names: list[bytes], tier: Tier, is_wanted: bool, wait_ms: int) -> list[Status]:
        timeout_ms = wait_ms + DEFAULT_TIMEOUT_MS
        return await self._ask_statuses(
            m.ChangeReplica, names, int(tier), is_wanted, wait_ms, timeout_ms=timeout_ms
        )

    async def remove(self, key: str | bytes, *, force: bool = False) -> Status:
        return (await self.batch_remove([key], force=force))[0]

    async def batch_remove(self, keys: Sequence[str | bytes], *, force: bool = False) -> list[Status]:
        return await self._ask_statuses(m.Remove, keys, force)

    async def pin(self, key: str | bytes, kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000) -> Status:
        return (await self._ask_statuses(m.Pin, [key], int(kind), ttl_ms))[0]

    async def unpin(self, key: str | bytes) -> Status:
        return (await self._ask_statuses(m.Unpin, [key]))[0]

    async def evict(
        self, size_bytes: int = 0, strategy: EvictStrategy = EvictStrategy.SAVE
    ) -> tuple[int, int]:
        """Has the store make that many bytes of DRAM free (0: all it can): (objects, bytes)."""
        outcome, _ = await self._ask(m.Evict, (size_bytes, int(strategy)))
        return (outcome.num_objects, outcome.size_bytes) if isinstance(outcome, m.EvictReply) else (0, 0)

    async def list_keys(self, cursor: int = 0, limit: int = 1000) -> tuple[list[KeyInfo], int]:
        outcome, _ = await self._ask(m.ListKeys, (cursor, limit))
        return (outcome.keys, outcome.next_cursor) if isinstance(outcome, m.ListKeysReply) else ([], 0)

    async def stats(self) -> dict[str, float]:
        """The store's own numbers; empty when it cannot be asked."""
        outcome, _ = await self._ask(m.Stats, ())
        return outcome.values if isinstance(outcome, m.StatsReply) else {}

    async def _ask_statuses(
        self,
        kind: type[Message],
        keys: Sequence[str | bytes],
        *fields: object,
        timeout_ms: float | None = None,
    ) -> list[Status]:
        statuses: list[Status] = []
        for run in key_runs(named_all(keys), self._max_keys or len(keys) or 1):
            outcome, _ = await self._ask(kind, (run, *fields), timeout_ms)
            statuses += statuses_of(outcome, len(run))
        return statuses
