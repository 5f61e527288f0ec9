"""Words that all messages use, and the base of all messages."""

import enum

import msgspec

PROTOCOL_VERSION = 2


class Status(enum.IntEnum):
    """What happened to one key. Only OK carries bytes; everything else is some kind of miss."""

    OK = 0
    MISSING = 1  # no such object (any more)
    EXISTS = 2  # a sealed object holds this key; the first writer won
    PENDING = 3  # somebody is writing it, or the asked layers have not been committed yet
    FULL = 4  # no room could be made in time
    ABANDONED = 5  # its writer went away or gave up
    TIMED_OUT = 6  # not ready within wait_ms
    CORRUPT = 7  # checksum mismatch; the object is dropped
    TOO_LARGE = 8  # larger than the store could ever hold
    LEASED = 9  # a lease or a pin protects it
    INVALID = 10  # the request made no sense for this key (wrong size, layer out of range, not yours)
    UNAVAILABLE = 11  # client side only: no connection to the store, or it broke while asking


class Tier(enum.IntEnum):
    NONE = 0
    DRAM = 1
    SSD = 2
    REMOTE = 3


class PinKind(enum.IntEnum):
    SOFT = 1  # evicted last, until its time to live ends
    HARD = 2  # never evicted


class ErrorCode(enum.IntEnum):
    UNKNOWN_MESSAGE = 1
    BAD_TOKEN = 2
    VERSION = 3
    OVER_LIMIT = 4
    NOT_READY = 5
    INTERNAL = 6
    BAD_REQUEST = 7
    FORBIDDEN = 8


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages; `id` pairs an answer with its request."""

    id: int
