"""Mooncake's error codes, and which of them stands for which of our statuses."""

import enum

from kvcore.wire.messages import Status


class MooncakeError(enum.IntEnum):
    """The codes of Mooncake 0.3.13 (its ErrorCode) that this API gives."""

    OK = 0
    INTERNAL_ERROR = -1
    NO_AVAILABLE_HANDLE = -200  # no room for it
    INVALID_PARAMS = -600  # also: an empty value, a buffer too small, an object too large
    REPLICA_IS_NOT_READY = -703  # still being written
    OBJECT_NOT_FOUND = -704
    OBJECT_HAS_LEASE = -706  # leased or pinned
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900  # no store, or no answer in time


_CODES = {
    Status.OK: MooncakeError.OK,
    Status.MISSING: MooncakeError.OBJECT_NOT_FOUND,
    Status.EXISTS: MooncakeError.OK,
    Status.PENDING: MooncakeError.REPLICA_IS_NOT_READY,
    Status.FULL: MooncakeError.NO_AVAILABLE_HANDLE,
    Status.ABANDONED: MooncakeError.OBJECT_NOT_FOUND,
    Status.TIMED_OUT: MooncakeError.RPC_FAIL,
    Status.CORRUPT: MooncakeError.CHECKSUM_MISMATCH,
    Status.TOO_LARGE: MooncakeError.INVALID_PARAMS,
    Status.LEASED: MooncakeError.OBJECT_HAS_LEASE,
    Status.INVALID: MooncakeError.INVALID_PARAMS,
    Status.UNAVAILABLE: MooncakeError.RPC_FAIL,
}


def code_of(status: Status) -> int:
    """For everything but a put. A plain int, as the bindings give."""
    return int(_CODES[status])


def put_code_of(status: Status) -> int:
    """A put of a key that is there, or that somebody else is writing, succeeds and changes nothing: the first
    writer wins."""
    return 0 if status is Status.PENDING else code_of(status)
