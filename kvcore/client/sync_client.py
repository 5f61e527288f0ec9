"""StoreClient: the blocking face of the store, for engine threads and scripts."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from kvcore.client.address import parse_address
from kvcore.client.arena import Arenas
from kvcore.client.base import UNAVAILABLE_LOOKUP, LookupResult
from kvcore.client.counters import TIMEOUTS_TOTAL, UNAVAILABLE_TOTAL, Counters
from kvcore.client.link import DEFAULT_TIMEOUT_MS, LinkKeeper, LinkOptions
from kvcore.client.names import key_runs, named_all
from kvcore.client.tls import client_context
from kvcore.errors import RequestRefused
from kvcore.layout import as_views, split_views, total_bytes
from kvcore.transport.base import Buffer, ReadBatch, Transfer, WriteBatch, check_batch
from kvcore.transport.channel import Outcome
from kvcore.transport.choose import Plane, check_planes
from kvcore.transport.parts import (
    FinishedTransfer,
    Observer,
    Reservation,
    Sink,
    are_found,
    failure_of,
    status_of,
    statuses_of,
    writable_views,
)
from kvcore.wire import messages as m
from kvcore.wire.messages import KeyInfo, Message, PinKind, Status

logger = logging.getLogger(__name__)

# Taken for large: a plane with a fast path for large objects should use it.
UNKNOWN_SIZE_BYTES = 1 << 20


class StoreClient:
    """Implements LayerwiseStore and ObjectStore (kvcore/client/base.py). Thread-safe; one socket.

    The constructor returns at once and connects in the background; `StoreClient.connect` waits for the first
    attempt. Without a store every call is a miss that costs microseconds, and the store is used again as
    soon as it is back. After a fork the child makes its own connection.

    address      "127.0.0.1:50051", "tcp://host:port", "tls://host:port" or "unix:///path"
    token        what the store was told to ask for, if it was
    planes       best first; tcp is always there as the last resort
    timeout_ms   deadline of a call without its own; a read's wait_ms comes on top
    silence_ms   a store that is due and has not sent a byte for so long is given up and reconnected to
    checksums    xxh3-64 of what is written, and verification of what is read over tcp
    verify_shm   verification of what is read over shm, too
    tls_ca       for tls://: a file of certificates to trust, "" for those of the system
    tls_cert     and tls_key: files of our own certificate, for a store that asks for one
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        planes: Sequence[str] = ("shm", "tcp"),
        timeout_ms: float = DEFAULT_TIMEOUT_MS,
        connect_timeout_ms: float = 2000.0,
        silence_ms: float = 2000.0,
        client_name: str = "",
        checksums: bool = True,
        verify_shm: bool = False,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
    ) -> None:
        self._timeout_s = timeout_ms / 1e3
        self._counters = Counters()
        where = parse_address(address)
        options = LinkOptions(
            address=where,
            token=token,
            planes=check_planes(planes),
            timeout_ms=timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            silence_ms=silence_ms,
            client_name=client_name or f"python {os.getpid()}",
            checksums=checksums,
            verify_shm=verify_shm,
            tls=client_context(where, tls_ca, tls_cert, tls_key),
        )
        self._keeper = LinkKeeper(options, self._counters)
        self._arenas = Arenas()
        self._keeper.reconnect()

    @classmethod
    def connect(cls, address: str, **options: Any) -> "StoreClient":
        """As the constructor, but waits for the first attempt. RequestRefused when the store does not want
        us; a store that is not there is no error, it will be looked for in the background."""
        client = cls(address, **options)
        try:
            client._keeper.first_attempt()
        except RequestRefused:
            client.close()
            raise
        return client

    @property
    def connected(self) -> bool:
        return self._keeper.current() is not None

    @property
    def plane(self) -> Plane | None:
        """The plane in use (a Transport), None while there is no store."""
        link = self._keeper.current()
        return link.plane if link else None

    def counters(self) -> dict[str, int | str]:
        link = self._keeper.current()
        return {
            **self._counters.snapshot(),
            "connected": int(link is not None),
            "state": self._keeper.state,
            "plane": link.plane.name if link else "",
            "plane_reason": link.plane_reason if link else "",
            "server_id": link.server_id if link else "",
            "last_error": self._keeper.last_error,
        }

    def close(self) -> None:
        self._keeper.close()

    def __enter__(self) -> "StoreClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- LayerwiseStore --------------------------------------------------------------------------------

    def lookup(
        self, keys: Sequence[bytes], *, include_pending: bool = False, timeout_ms: float | None = None
    ) -> LookupResult:
        link = self._keeper.current()
        if link is None:
            self._counters.add(UNAVAILABLE_TOTAL)
            return UNAVAILABLE_LOOKUP
        deadline = self._deadline(timeout_ms)
        layers_ready: list[int] = []
        tiers: list[int] = []
        load = 0.0
        for run in key_runs(list(keys), link.connection.max_keys):
            outcome = link.connection.ask(m.Lookup, (run, include_pending), deadline)
            if not isinstance(outcome, m.LookupReply):
                self._count_failure(outcome)
                return UNAVAILABLE_LOOKUP
            layers_ready += outcome.layers_ready
            tiers += outcome.tiers
            load = outcome.load
            if outcome.num_hits < len(run):
                break
        return LookupResult(num_hits=len(layers_ready), layers_ready=layers_ready, tiers=tiers, load=load)

    def reserve(
        self,
        keys: Sequence[bytes],
        size_bytes: int,
        num_layers: int = 1,
        *,
        parents: Sequence[bytes] = (),
        timeout_ms: float | None = None,
    ) -> list[Status]:
        link = self._keeper.current()
        if link is None:
            self._counters.add(UNAVAILABLE_TOTAL)
            return [Status.UNAVAILABLE] * len(keys)
        deadline = self._deadline(timeout_ms)
        statuses: list[Status] = []
        for run in key_runs(list(keys), link.connection.max_keys):
            run_parents = list(parents[len(statuses) : len(statuses) + len(run)])
            outcome = link.connection.ask(m.Reserve, (run, [size_bytes], num_layers, run_parents), deadline)
            if not isinstance(outcome, m.ReserveReply) or len(outcome.grants) != len(run):
                self._count_failure(outcome)
                if outcome is Status.TIMED_OUT:
                    # It may be granted after all, and would then keep others from writing.
                    link.connection.forget(m.Abort, (run,))
                statuses += [failure_of(outcome)] * len(run)
                continue
            for key, grant in zip(run, outcome.grants, strict=True):
                status = status_of(grant.status)
                if status is Status.OK:
                    link.reservations[key] = Reservation(grant, size_bytes, num_layers)
                statuses.append(status)
        return statuses

    def write_layers(
        self, keys: Sequence[bytes], layer_begin: int, layer_end: int, buffers: Sequence[Any]
    ) -> Transfer:
        return self._submit(
            WriteBatch(keys=keys, buffers=buffers, layer_begin=layer_begin, layer_end=layer_end)
        )

    def read_layers(
        self,
        keys: Sequence[bytes],
        layer_begin: int,
        layer_end: int,
        buffers: Sequence[Any],
        *,
        wait_ms: int = 0,
    ) -> Transfer:
        return self._submit(
            ReadBatch(
                keys=keys, buffers=buffers, layer_begin=layer_begin, layer_end=layer_end, wait_ms=wait_ms
            )
        )

    def abort(self, keys: Sequence[bytes]) -> None:
        link = self._keeper.current()
        if link is None or not keys:
            return
        for key in keys:
            link.reservations.pop(key, None)
        for run in key_runs(list(keys), link.connection.max_keys):
            link.connection.forget(m.Abort, (run,))

    # ---- ObjectStore -----------------------------------------------------------------------------------

    def put(self, key: str | bytes, value: Buffer) -> Status:
        return self.batch_put_from([key], [value])[0]

    def put_from(self, key: str | bytes, buffer: Buffer) -> Status:
        return self.batch_put_from([key], [buffer])[0]

    def batch_put_from(self, keys: Sequence[str | bytes], buffers: Sequence[Buffer]) -> list[Status]:
        _check_lengths(keys, buffers)
        values = [as_views(buffer) for buffer in buffers]
        if not all(map(total_bytes, values)):
            raise ValueError("an empty value cannot be stored: an object has at least one byte")
        link = self._keeper.current()
        if link is None:
            return self._unavailable(self._counters.written, len(keys))
        return link.plane.submit_put(named_all(keys), values).wait()

    def get(self, key: str | bytes) -> bytes | None:
        # Taken here: the sink is called by whichever thread receives, the arena is this one's.
        arena = self._arenas.own
        place = memoryview(b"")

        def sink(index: int, size_bytes: int) -> list[memoryview]:
            nonlocal place
            place = arena.take(size_bytes)
            return [place]

        statuses = self._fetch([key], [UNKNOWN_SIZE_BYTES], sink)
        return bytes(place) if statuses == [Status.OK] else None

    def get_into(self, key: str | bytes, buffer: Buffer) -> int:
        return self.batch_get_into([key], [buffer])[0]

    def batch_get_into(self, keys: Sequence[str | bytes], buffers: Sequence[Buffer]) -> list[int]:
        _check_lengths(keys, buffers)
        places = [writable_views(buffer) for buffer in buffers]
        room_bytes = [total_bytes(views) for views in places]
        sizes_bytes = [-1] * len(keys)

        def sink(index: int, size_bytes: int) -> list[memoryview] | None:
            if size_bytes > room_bytes[index]:
                return None
            sizes_bytes[index] = size_bytes
            views = places[index]
            if size_bytes == room_bytes[index]:
                return views
            return split_views(views, [size_bytes])[0]

        statuses = self._fetch(keys, room_bytes, sink)
        ok = Status.OK
        return [size if status is ok else -1 for size, status in zip(sizes_bytes, statuses, strict=True)]

    def exists(self, key: str | bytes) -> bool:
        return self.batch_exists([key])[0]

    def batch_exists(self, keys: Sequence[str | bytes]) -> list[bool]:
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        found: list[bool] = []
        for run in key_runs(named_all(keys), max_keys):
            outcome = self._ask(m.Exists, run)
            if isinstance(outcome, m.StatusReply) and len(outcome.statuses) == len(run):
                found += are_found(outcome.statuses)
            else:
                found += [False] * len(run)
        return found

    def remove(self, key: str | bytes, *, force: bool = False) -> Status:
        self._settle()
        return self._ask_statuses(m.Remove, [key], force)[0]

    def pin(self, key: str | bytes, kind: PinKind = PinKind.SOFT, *, ttl_ms: int = 1_800_000) -> Status:
        return self._ask_statuses(m.Pin, [key], int(kind), ttl_ms)[0]

    def unpin(self, key: str | bytes) -> Status:
        return self._ask_statuses(m.Unpin, [key])[0]

    def evict(self, size_bytes: int = 0) -> tuple[int, int]:
        self._settle()
        outcome = self._ask(m.Evict, size_bytes)
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

    def verify(self, *, start: bool = False) -> m.VerifyReply | None:
        """Has every checksum checked (`start`); ask again for how far it is. None: no answer."""
        outcome = self._ask(m.Verify, start)
        return outcome if isinstance(outcome, m.VerifyReply) else None

    # ---- inside ----------------------------------------------------------------------------------------

    def _submit(self, batch: ReadBatch | WriteBatch) -> Transfer:
        link = self._keeper.current()
        if link is not None:
            return link.plane.submit(batch)
        check_batch(batch)
        observe = self._counters.written if isinstance(batch, WriteBatch) else self._counters.read
        return FinishedTransfer(self._unavailable(observe, len(batch.keys)))

    def _fetch(self, keys: Sequence[str | bytes], sizes_bytes: Sequence[int], sink: Sink) -> list[Status]:
        link = self._keeper.current()
        if link is None:
            return self._unavailable(self._counters.read, len(keys))
        return link.plane.submit_read(named_all(keys), sizes_bytes, sink).wait()

    def _settle(self) -> None:
        link = self._keeper.current()
        if link is not None:
            link.plane.settle()

    def _unavailable(self, observe: Observer, num_keys: int) -> list[Status]:
        statuses = [Status.UNAVAILABLE] * num_keys
        observe(statuses, 0)
        return statuses

    def _ask(self, kind: type[Message], *fields: object) -> Outcome:
        link = self._keeper.current()
        if link is None:
            self._counters.add(UNAVAILABLE_TOTAL)
            return Status.UNAVAILABLE
        outcome = link.connection.ask(kind, fields, self._deadline(None))
        if isinstance(outcome, Status | m.ErrorReply):
            self._count_failure(outcome)
        return outcome

    def _ask_statuses(
        self, kind: type[Message], keys: Sequence[str | bytes], *fields: object
    ) -> list[Status]:
        link = self._keeper.current()
        max_keys = link.connection.max_keys if link else len(keys) or 1
        statuses: list[Status] = []
        for run in key_runs(named_all(keys), max_keys):
            statuses += statuses_of(self._ask(kind, run, *fields), len(run))
        return statuses

    def _deadline(self, timeout_ms: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_ms is None else timeout_ms / 1e3)

    def _count_failure(self, outcome: Outcome) -> None:
        if isinstance(outcome, m.ErrorReply):
            logger.warning("the store refused a request: %s", outcome.message)
        self._counters.add(TIMEOUTS_TOTAL if outcome is Status.TIMED_OUT else UNAVAILABLE_TOTAL)


def _check_lengths(keys: Sequence[object], buffers: Sequence[object]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")


def _first_bytes(views: list[memoryview], size_bytes: int, room_bytes: int) -> list[memoryview] | None:
    if size_bytes > room_bytes:
        return None
    return split_views(views, [size_bytes])[0] if size_bytes < room_bytes else views
