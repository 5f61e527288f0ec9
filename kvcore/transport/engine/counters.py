"""What the engine counts; read by other threads, written by the worker."""

import msgspec


class EngineCounters(msgspec.Struct, kw_only=True):
    made_endpoints: int = 0
    failed_endpoints: int = 0
    evicted_endpoints: int = 0
    retried_slices: int = 0
