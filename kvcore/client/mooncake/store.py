"""MooncakeDistributedStore: the class that code written for Mooncake's Python bindings expects."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvcore.client.mooncake.codes import MooncakeError, code_of, put_code_of
from kvcore.client.mooncake.config import resolve
from kvcore.client.mooncake.memory import BufferHandle, are_even, is_memory, memory_at
from kvcore.client.mooncake.replicas import Pinner, ReplicateConfig
from kvcore.client.mooncake.unsupported import hint_for
from kvcore.client.sync_client import StoreClient
from kvcore.errors import LocalProtocolError, RequestRefused
from kvcore.keys import object_key, object_keys, object_namespace
from kvcore.layout import as_views, split_views, total_bytes
from kvcore.transport.base import Buffer, Region
from kvcore.transport.protocol import planes_of
from kvcore.wire.messages import Status

logger = logging.getLogger(__name__)

Views = list[memoryview]
Place = Callable[[int], Views | None]  # where a value of so many bytes goes; None: it does not fit
INVALID = int(MooncakeError.INVALID_PARAMS)
# Taken for large: a plane with a fast path for large objects should use it.
_UNKNOWN_SIZE_BYTES = 1 << 20
_LISTED_KEYS = 10_000


class MooncakeDistributedStore:
    """Results are those of Mooncake: 0 or a size for success, a negative MooncakeError otherwise; nothing is
    raised for what the store or the network does. Raised are LocalProtocolError before `setup` and after
    `close`, and ConfigError for settings that make no sense. Thread-safe.

    Addresses must be of memory of this process, on the CPU. Registering is not needed; over RDMA it spares a
    copy, and pins the memory; unregister it when the last transfer from or to it has ended."""

    def __init__(self) -> None:
        self._open_client: StoreClient | None = None
        self._namespace = object_namespace()
        self._hostname = ""
        self._registered: dict[int, int] = {}
        self._regions: dict[int, Region] = {}
        self._pinner = Pinner()

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that code which asks hasattr() first takes its other way.
        hint = hint_for(name)
        if hint is None:
            raise AttributeError(f"{type(self).__name__} has no method {name}")
        raise AttributeError(f"{name} is not supported over mooncake-store: {hint}")

    # ---- connection ------------------------------------------------------------------------------------

    def setup(
        self,
        local_hostname: str | dict[str, Any] = "",
        metadata_server: str = "",
        global_segment_size: int = 0,
        local_buffer_size: int = 0,
        protocol: str = "",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "",
        enable_client_http_server: bool = False,
        client_http_port: int = 0,
    ) -> int:
        """Connects to the mooncake-store at `master_server_addr`, else at that of the configuration file or
        of MOONCAKE_MASTER. The first argument may be Mooncake's dict of all. `protocol` and `rdma_devices`
        say how bytes may move; other arguments are Mooncake's and have no meaning here. RPC_FAIL, with a line
        in the log, when the store is not there."""
        given: dict[str, Any]
        if isinstance(local_hostname, dict):
            given = local_hostname
        else:
            given = {
                "local_hostname": local_hostname,
                "master_server_address": master_server_addr,
                "protocol": protocol,
                "device_name": rdma_devices,
                "tenant_id": tenant_id,
            }
        config = resolve(given)
        if self._open_client is not None:
            raise LocalProtocolError("this store is set up already; close() it first")
        address = config.master_server_address
        try:
            client = StoreClient.connect(
                address,
                token=config.store_token,
                tls_ca=config.store_tls_ca,
                planes=planes_of(config.protocol),
                device_name=config.device_name,
            )
        except RequestRefused as error:
            logger.error("store %s refuses us: %s", address, error)
            return int(MooncakeError.RPC_FAIL)
        if not client.connected:
            logger.error("no store at %s: %s", address, client.counters()["last_error"])
            client.close()
            return int(MooncakeError.RPC_FAIL)
        self._namespace = object_namespace(config.tenant_id)
        self._hostname = config.local_hostname
        self._open_client = client
        for buffer_ptr, size in self._registered.items():
            self._regions[buffer_ptr] = client.register(memory_at(buffer_ptr, size))
        return 0

    def close(self) -> int:
        client, self._open_client = self._open_client, None
        if client is not None:
            client.close()
        self._regions.clear()
        return 0

    def health_check(self) -> int:
        """0 healthy, 1 not set up or closed, 2 the store cannot be reached."""
        if self._open_client is None:
            return 1
        (status,) = self._open_client.batch_status([self._key("")])
        return 2 if status in (Status.UNAVAILABLE, Status.TIMED_OUT) else 0

    def get_hostname(self) -> str:
        return self._hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if not is_memory(buffer_ptr, size) or buffer_ptr in self._registered:
            return INVALID
        self._registered[buffer_ptr] = size
        if self._open_client is not None:
            self._regions[buffer_ptr] = self._open_client.register(memory_at(buffer_ptr, size))
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        region = self._regions.pop(buffer_ptr, None)
        if region is not None:
            region.close()
        return INVALID if self._registered.pop(buffer_ptr, None) is None else 0

    # ---- put -------------------------------------------------------------------------------------------

    def put(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        return self._put([key], [as_views(value)], config)[0]

    def put_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        """One object of all parts, one behind the other."""
        return self._put([key], [as_views(parts)], config)[0]

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        """0, or the error of the first key that has one; the others are stored all the same."""
        if not are_even(keys, values):
            return INVALID
        return _first_error(self._put(keys, [as_views(value) for value in values], config))

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        if not are_even(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        return self._put(keys, _single_views(buffer_ptrs, sizes), config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """The buffers of one key make one object, one behind the other."""
        if not are_even(keys, all_buffer_ptrs, all_sizes):
            return [INVALID] * len(keys)
        return self._put(keys, list(map(_views, all_buffer_ptrs, all_sizes)), config)

    # ---- upsert: not atomic, a reader in between misses ------------------------------------------------

    def upsert(self, key: str, value: Buffer, config: ReplicateConfig | None = None) -> int:
        return self._upsert([key], [as_views(value)], config)[0]

    def upsert_parts(self, key: str, *parts: Buffer, config: ReplicateConfig | None = None) -> int:
        return self._upsert([key], [as_views(parts)], config)[0]

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Buffer], config: ReplicateConfig | None = None
    ) -> int:
        if not are_even(keys, values):
            return INVALID
        return _first_error(self._upsert(keys, [as_views(value) for value in values], config))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        if not are_even(keys, buffer_ptrs, sizes):
            return [INVALID] * len(keys)
        return self._upsert(keys, _single_views(buffer_ptrs, sizes), config)

    # ---- get -------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes:
        """b"" when it is not there."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [b"" if handle is None else bytes(handle) for handle in self.batch_get_buffer(keys)]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        handles: list[BufferHandle] = [BufferHandle()] * len(keys)

        def place_of(index: int) -> Place:
            def place(size_bytes: int) -> Views:
                handles[index] = BufferHandle(size_bytes)
                return [memoryview(handles[index])]

            return place

        found = self._get(keys, [_UNKNOWN_SIZE_BYTES] * len(keys), [*map(place_of, range(len(keys)))])
        return [handle if code >= 0 else None for handle, code in zip(handles, found, strict=True)]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """The size of each object, or an error; INVALID_PARAMS for a buffer that is too small."""
        return self.batch_get_into_multi_buffers(
            keys, [[ptr] for ptr in buffer_ptrs], [[size] for size in sizes]
        )

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        if not are_even(keys, all_buffer_ptrs, all_sizes):
            return [INVALID] * len(keys)
        buffers = list(map(_views, all_buffer_ptrs, all_sizes))
        rooms_bytes = [total_bytes(views) for views in buffers]
        places = [_fitting(views, room) for views, room in zip(buffers, rooms_bytes, strict=True)]
        return self._get(keys, rooms_bytes, places)

    # ---- what is there ---------------------------------------------------------------------------------

    def is_exist(self, key: str) -> int:
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1 there, 0 not there (or not written to its end), -1 no answer."""
        statuses = self._client().batch_status(self._keys(keys))
        if statuses.count(Status.OK) == len(statuses):
            return [1] * len(statuses)
        absent = (Status.MISSING, Status.PENDING)
        return [1 if status is Status.OK else 0 if status in absent else -1 for status in statuses]

    def get_size(self, key: str) -> int:
        client = self._client()
        size_bytes = client.get_size(self._key(key))
        if size_bytes >= 0:
            return size_bytes
        return int(MooncakeError.OBJECT_NOT_FOUND if client.connected else MooncakeError.RPC_FAIL)

    # ---- remove ----------------------------------------------------------------------------------------

    def remove(self, key: str, force: bool = False) -> int:
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        statuses = self._client().batch_remove(self._keys(keys), force=force)
        return [code_of(status) for status in statuses]

    def remove_all(self, force: bool = False) -> int:
        """How many objects of this tenant, of those put by name, were removed. KV blocks of engines stay."""
        client = self._client()
        num_removed = cursor = 0
        # No object has this name; but a disk that is out of service has to learn that something was removed.
        client.remove(self._key(""))
        while True:
            infos, cursor = client.list_keys(cursor, _LISTED_KEYS)
            keys = [info.key for info in infos if info.key.startswith(self._namespace)]
            num_removed += client.batch_remove(keys, force=force).count(Status.OK)
            if not cursor:
                return num_removed

    # ---- inside ----------------------------------------------------------------------------------------

    def _client(self) -> StoreClient:
        if self._open_client is None:
            raise LocalProtocolError("not connected: call setup() first")
        return self._open_client

    def _key(self, key: str) -> bytes:
        return object_key(key, self._namespace)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return object_keys(keys, self._namespace)

    def _put(self, keys: Sequence[str], values: list[Views], config: ReplicateConfig | None) -> list[int]:
        client = self._client()
        codes = [INVALID] * len(keys)
        good = [index for index, key in enumerate(keys) if key and total_bytes(values[index])]
        names = self._keys([keys[index] for index in good])
        statuses = client.batch_put_from(names, [values[index] for index in good])
        for index, status in zip(good, statuses, strict=True):
            codes[index] = put_code_of(status)
        stored = [name for name, status in zip(names, statuses, strict=True) if status is Status.OK]
        self._pinner.apply(client, stored, config)
        return codes

    def _upsert(self, keys: Sequence[str], values: list[Views], config: ReplicateConfig | None) -> list[int]:
        good = [key for key, value in zip(keys, values, strict=True) if key and total_bytes(value)]
        self._client().batch_remove(self._keys(good), force=True)
        return self._put(keys, values, config)

    def _get(self, keys: Sequence[str], sizes_bytes: list[int], places: list[Place]) -> list[int]:
        plane = self._client().plane
        if plane is None:
            return [int(MooncakeError.RPC_FAIL)] * len(keys)
        found_bytes = [0] * len(keys)

        def sink(index: int, size_bytes: int) -> Views | None:
            found_bytes[index] = size_bytes
            return places[index](size_bytes)

        statuses = plane.submit_read(self._keys(keys), sizes_bytes, sink).wait()
        return [
            size_bytes if status is Status.OK else code_of(status)
            for size_bytes, status in zip(found_bytes, statuses, strict=True)
        ]


def _views(buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> Views:
    """Nothing for what is no memory: no value and no object is that small."""
    if not are_even(buffer_ptrs, sizes) or not all(map(is_memory, buffer_ptrs, sizes)):
        return []
    return list(map(memory_at, buffer_ptrs, sizes))


def _single_views(buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[Views]:
    return [_views([ptr], [size]) for ptr, size in zip(buffer_ptrs, sizes, strict=True)]


def _fitting(views: Views, room_bytes: int) -> Place:
    def place(size_bytes: int) -> Views | None:
        return split_views(views, [size_bytes])[0] if size_bytes <= room_bytes else None

    return place


def _first_error(codes: Sequence[int]) -> int:
    return next((code for code in codes if code), 0)
