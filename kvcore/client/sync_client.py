"""StoreClient: the blocking face of the store, for engine threads and scripts."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from kvcore.client.address import parse_address
from kvcore.client.arena import Arenas
from kvcore.client.base import UNAVAILABLE_LOOKUP, LookupResult, is_lookup_of
from kvcore.client.counters import UNAVAILABLE_TOTAL, Counters
from kvcore.client.link import DEFAULT_TIMEOUT_MS, LinkKeeper, LinkOptions
from kvcore.client.management import Management
from kvcore.client.names import key_runs, key_runs_with_parents, named, named_all
from kvcore.client.tls import client_context
from kvcore.errors import RequestRefused
from kvcore.layout import as_views, split_views, total_bytes
from kvcore.transport.base import Buffer, ReadBatch, Region, Transfer, WriteBatch, check_batch
from kvcore.transport.choose import Plane, check_planes
from kvcore.transport.parts import (
    FinishedTransfer,
    Observer,
    Reservation,
    Sink,
    UnpinnedRegion,
    failure_of,
    status_of,
    writable_views,
)
from kvcore.transport.pool_view import ObjectView
from kvcore.transport.rdma_host import RdmaHost
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.wire import messages as m
from kvcore.wire.messages import Status

logger = logging.getLogger(__name__)

# Taken for large: a plane with a fast path for large objects should use it.
UNKNOWN_SIZE_BYTES = 1 << 20


class StoreClient(Management):
    """Implements LayerwiseStore and ObjectStore (kvcore/client/base.py). Thread-safe; one socket.

    The constructor returns at once and connects in the background; `StoreClient.connect` waits for the first
    attempt. Without a store every call is a miss that costs microseconds, and the store is used again as
    soon as it is back. After a fork the child makes its own connection.

    address      "127.0.0.1:50051", "tcp://host:port", "tls://host:port" or "unix:///path"
    token        what the store was told to ask for, if it was
    planes       best first; tcp is always there as the last resort
    device_name  RDMA devices to use, comma-separated; "" for all whose port is up
    timeout_ms   deadline of a call without its own; a read's wait_ms comes on top
    silence_ms   a store that is due and has not sent a byte for so long is given up and reconnected to
    checksums    xxh3-64 of what is written, and verification of what is read over tcp and rdma
    verify_shm   verification of all that is read over shm, not only of what came over a network
    tls_ca       for tls://: a file of certificates to trust, "" for those of the system
    tls_cert     and tls_key: files of our own certificate, for a store that asks for one
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        planes: Sequence[str] = ("rdma", "shm", "tcp"),
        device_name: str = "",
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
        counters = Counters()
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
            rdma=_open_rdma(planes, device_name),
        )
        super().__init__(LinkKeeper(options, counters), counters, timeout_ms / 1e3)
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
            **(link.plane.counters() if link else {}),
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
            if not isinstance(outcome, m.LookupReply) or not is_lookup_of(run, outcome):
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
        for run, run_parents in key_runs_with_parents(list(keys), parents, link.connection.max_keys):
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
        runs = key_runs(list(keys), link.connection.max_keys)

        def say() -> None:
            for run in runs:
                link.connection.forget(m.Abort, (run,))

        link.plane.after_writes(say)

    def register(self, buffer: Buffer) -> Region:
        rdma = self._keeper.rdma
        return rdma.register(buffer) if isinstance(rdma, RdmaHost) else UnpinnedRegion(buffer)

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

        return bytes(place) if self._fetch_one(key, UNKNOWN_SIZE_BYTES, sink) is Status.OK else None

    def get_view(self, key: str | bytes) -> ObjectView | None:
        """The value without a copy where the plane allows it, under a lease; None for a miss. Use it in a
        `with` block and read ObjectView about what must be dropped before its end."""
        link = self._keeper.current()
        if link is None:
            self._unavailable(self._counters.read, 1)
            return None
        return link.plane.view_one(named(key))

    def get_into(self, key: str | bytes, buffer: Buffer) -> int:
        views = writable_views(buffer)
        room_bytes = total_bytes(views)
        found_bytes = -1

        def sink(index: int, size_bytes: int) -> list[memoryview] | None:
            nonlocal found_bytes
            found_bytes = size_bytes
            return views if size_bytes == room_bytes else _first_bytes(views, size_bytes, room_bytes)

        return found_bytes if self._fetch_one(key, room_bytes, sink) is Status.OK else -1

    def batch_get_into(self, keys: Sequence[str | bytes], buffers: Sequence[Buffer]) -> list[int]:
        _check_lengths(keys, buffers)
        places = [writable_views(buffer) for buffer in buffers]
        room_bytes = [total_bytes(views) for views in places]
        sizes_bytes = [-1] * len(keys)

        def sink(index: int, size_bytes: int) -> list[memoryview] | None:
            sizes_bytes[index] = size_bytes
            return _first_bytes(places[index], size_bytes, room_bytes[index])

        statuses = self._fetch(keys, room_bytes, sink)
        ok = Status.OK
        return [size if status is ok else -1 for size, status in zip(sizes_bytes, statuses, strict=True)]

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

    def _fetch_one(self, key: str | bytes, size_bytes: int, sink: Sink) -> Status:
        link = self._keeper.current()
        if link is None:
            return self._unavailable(self._counters.read, 1)[0]
        return link.plane.read_one(named(key), size_bytes, sink)

    def _unavailable(self, observe: Observer, num_keys: int) -> list[Status]:
        statuses = [Status.UNAVAILABLE] * num_keys
        observe(statuses, 0)
        return statuses


def _open_rdma(planes: Sequence[str], device_name: str) -> RdmaHost | str:
    """Or why there is none. ConfigError when there are devices, but not the one asked for."""
    if "rdma" not in planes:
        return "not wanted"
    try:
        return RdmaHost.open(device_name)
    except RdmaUnavailable as error:
        return str(error)


def _check_lengths(keys: Sequence[object], buffers: Sequence[object]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys but {len(buffers)} buffers")


def _first_bytes(views: list[memoryview], size_bytes: int, room_bytes: int) -> list[memoryview] | None:
    if size_bytes > room_bytes:
        return None
    return split_views(views, [size_bytes])[0] if size_bytes < room_bytes else views
