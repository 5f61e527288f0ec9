"""Names of every metric in one place, with units. Prometheus names are PREFIX + name."""

STORE_PREFIX = "mooncake_store_"
CONNECTOR_PREFIX = "mooncake_connector_"
ROUTER_PREFIX = "mooncake_router_"

# Store gauges (also the keys of StatsReply.values)
POOL_SIZE_BYTES = "pool_size_bytes"
POOL_USED_BYTES = "pool_used_bytes"
POOL_WASTED_BYTES = "pool_wasted_bytes"  # used, but by rounding up to size classes
POOL_STRANDED_BYTES = "pool_stranded_bytes"  # free, but only for objects of one size class
POOL_FREE_SLABS = "pool_free_slabs"
METADATA_BYTES = "metadata_bytes"
OBJECTS = "objects"
OBJECTS_PENDING = "objects_pending"
LEASES = "leases"
CONNECTIONS = "connections"
QUEUE_PAIRS = "queue_pairs"  # of clients on the rdma plane
QUARANTINED_BYTES = "quarantined_bytes"
WAITERS = "waiters"
WAITING_FOR_ROOM = "waiting_for_room"  # writers held back until write-back to disk has made room
LOAD = "load"  # share of one core that the store's loop takes, 0 to 1
PROMOTIONS = "promotions"  # objects on their way from disk to DRAM

# One for each tenant, with the label "tenant": TENANT_PREFIX + the name of the store's own number
TENANT_PREFIX = "tenant_"

# The store's SSD tier; there only when it has one. More of them: SSD_PREFIX + a key of SsdTier.stats()
SSD_PREFIX = "ssd_"

# The store's remote level. More of them: REMOTE_PREFIX + a key of RemoteTier.stats()
REMOTE_PREFIX = "remote_"
REMOTE_COPIES_PENDING = REMOTE_PREFIX + "copies_pending"  # objects on SSD that the remote has yet to get
REMOTE_COPIES_MISSED_TOTAL = REMOTE_PREFIX + "copies_missed_total"  # they left the SSD before

# Store counters
LOOKUP_KEYS_TOTAL = "lookup_keys_total"
LOOKUP_HITS_TOTAL = "lookup_hits_total"
READ_BYTES_TOTAL = "read_bytes_total"
WRITTEN_BYTES_TOTAL = "written_bytes_total"
LAYERS_COMMITTED_TOTAL = "layers_committed_total"
LAYERS_READ_BEFORE_SEAL_TOTAL = "layers_read_before_seal_total"
OBJECTS_SEALED_TOTAL = "objects_sealed_total"
OBJECTS_ABANDONED_TOTAL = "objects_abandoned_total"
EVICTED_OBJECTS_TOTAL = "evicted_objects_total"
EVICTED_BYTES_TOTAL = "evicted_bytes_total"
PROMOTED_OBJECTS_TOTAL = "promoted_objects_total"  # brought back from disk
PROMOTED_BYTES_TOTAL = "promoted_bytes_total"
RESERVE_FULL_TOTAL = "reserve_full_total"
CORRUPT_TOTAL = "corrupt_total"
LEASES_EXPIRED_TOTAL = "leases_expired_total"
PROTOCOL_ERRORS_TOTAL = "protocol_errors_total"
# Of objects that other stores hold, asked for by CopyFrom
COPYING = "copying"
COPIED_OBJECTS_TOTAL = "copied_objects_total"
COPIED_BYTES_TOTAL = "copied_bytes_total"
COPY_MISSING_TOTAL = "copy_missing_total"  # the other store did not have them
COPY_FAILED_TOTAL = "copy_failed_total"
# With [events] only
EVENTS_TOTAL = "events_total"
EVENT_REPLAYS_TOTAL = "event_replays_total"
EVENT_SNAPSHOTS_TOTAL = "event_snapshots_total"  # replays of more than the buffer held

# Connector counters (bytes and blocks are those of one rank, summed over ranks by vLLM)
LOOKUPS_TOTAL = "lookups_total"
LOOKUP_TIMEOUTS_TOTAL = "lookup_timeouts_total"
LOADED_BLOCKS_TOTAL = "loaded_blocks_total"
LOADED_BYTES_TOTAL = "loaded_bytes_total"
LOAD_SECONDS_TOTAL = "load_seconds_total"
LOAD_FAILED_BLOCKS_TOTAL = "load_failed_blocks_total"
LOADS_FAILED_TOTAL = "loads_failed_total"
SAVED_BLOCKS_TOTAL = "saved_blocks_total"
SAVED_BYTES_TOTAL = "saved_bytes_total"
SAVE_SKIPPED_PRESENT_TOTAL = "save_skipped_present_total"  # EXISTS or PENDING: somebody has saved it
SAVE_SKIPPED_FULL_TOTAL = "save_skipped_full_total"  # the store had no room
SAVE_SKIPPED_STAGING_TOTAL = "save_skipped_staging_total"  # layers came faster than they could leave
SAVE_FAILED_BLOCKS_TOTAL = "save_failed_blocks_total"  # the store went away or refused
HOOK_ERRORS_TOTAL = "hook_errors_total"  # a bug of ours that was kept out of the engine's step

# Router
ACTIVE_REQUESTS = "active_requests"
CLIENT_CONNECTIONS = "client_connections"
CLIENTS_GONE_TOTAL = "clients_gone_total"
DECODE_ONLY_TOTAL = "decode_only_total"
FIRST_BYTE_SECONDS = "first_byte_seconds"
INDEX_BLOCKS = "index_blocks"
INDEX_SIZE_BYTES = "index_size_bytes"
INDEX_EVENTS_TOTAL = "index_events_total"  # blocks or events, by what became of them
KV_EVENT_BATCHES_TOTAL = "kv_event_batches_total"
KV_EVENT_TROUBLES_TOTAL = "kv_event_troubles_total"  # gaps, restarts, losses, what could not be read
INSTANCE_BREAKER_OPEN = "instance_breaker_open"
INSTANCE_CONNECTIONS = "instance_connections"
INSTANCE_FOREIGN_REQUESTS = "instance_foreign_requests"  # as polled, sent by others
INSTANCE_IN_FLIGHT = "instance_in_flight"
INSTANCE_KV_CAPACITY_TOKENS = "instance_kv_capacity_tokens"
INSTANCE_KV_USED_TOKENS = "instance_kv_used_tokens"
INSTANCE_QUEUE_SECONDS = "instance_queue_seconds"  # until a prefill sent now would begin
INSTANCE_UP = "instance_up"
LEGS_TOTAL = "legs_total"
PREFIX_HIT_TOKENS_TOTAL = "prefix_hit_tokens_total"  # of PROMPT_TOKENS_TOTAL
PREFETCHED_BLOCKS_TOTAL = "prefetched_blocks_total"
COPIED_BLOCKS_TOTAL = "copied_blocks_total"
PREFIX_TRANSFERS_TOTAL = "prefix_transfers_total"  # by what they are fetched from
PROMPT_TOKENS_TOTAL = "prompt_tokens_total"
PROMPTS_TOTAL = "prompts_total"
REFUSALS_TOTAL = "refusals_total"
REJECTIONS_TOTAL = "rejections_total"
HOLDS_TOTAL = "holds_total"
REQUEST_SECONDS = "request_seconds"
REQUESTS_TOTAL = "requests_total"
RETRIES_TOTAL = "retries_total"
SLO_ANSWERS_TOTAL = "slo_answers_total"  # streamed answers that had an SLO, by whether it was met
TBT_SECONDS = "tbt_seconds"
TTFT_SECONDS = "ttft_seconds"
