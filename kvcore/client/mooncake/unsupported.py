"""Methods of Mooncake's store that ours does not have, and what to use instead."""

_TENSORS = "give the tensor's memory (data_ptr() and nbytes) to put_from and get_into"
_SESSIONS = "use reserve, write_layers and read_layers of StoreClient: readers follow the writer"
_SEGMENTS = "memory belongs to mooncake-store (--pool-size-bytes, storage_levels), not to its clients"
_REPLICAS = (
    "copies are those on the store's tiers (DRAM, SSD, remote): StoreClient.describe tells them, "
    "StoreClient.change_replica adds and drops them"
)

_HINTS = {
    "remove_by_regex": "the store keeps digests of names only: remove by key, or remove_all()",
    "put_from_with_metadata": "put_parts takes several buffers for one object",
    "setup_dummy": "use setup(): shared memory is used by itself when the store is on the same host",
    "alloc_from_mem_pool": "any memory will do, none has to be allocated or registered",
    "get_into_ranges": "get_into reads whole objects, StoreClient.read_layers single layers",
    "batch_get_into_multi_buffer_ranges": _SESSIONS,
    "batch_put_from_multi_buffer_ranges": _SESSIONS,
    "query_task": _REPLICAS,
    "create_copy_task": _REPLICAS,
    "create_move_task": _REPLICAS,
    "get_replica_desc": _REPLICAS,
    "batch_get_replica_desc": _REPLICAS,
    "batch_replica_clear": _REPLICAS,
    "get_offload_rpc_read_count": "see StoreClient.stats()",
    "init_all": "use setup()",
}
_PARTS = {"session": _SESSIONS, "segment": _SEGMENTS, "tensor": _TENSORS}


def hint_for(name: str) -> str | None:
    """What to do instead of calling a method of Mooncake's that is not here; None for a name that it does
    not have either."""
    if name in _HINTS:
        return _HINTS[name]
    return next((hint for part, hint in _PARTS.items() if part in name), None)
