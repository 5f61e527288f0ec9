"""What one store gets from another. Tag 58."""

from kvcore.wire.vocabulary import Message


class CopyFrom(Message, frozen=True, array_like=True, tag=58):
    """Have copies of these objects made in this store, from the store at `source` (an address as clients give
    it). The asked store connects there as a client, with the token of whoever asks. Answered by StatusReply,
    at once or within `wait_ms`.

    OK it is here, in DRAM or below; PENDING it is being copied (also after the answer), or another client is
    writing it; MISSING the source does not have it whole; FULL or TOO_LARGE there is no room for it here;
    CORRUPT it did not arrive as its writer made it; TIMED_OUT copying took longer than this store allows;
    UNAVAILABLE the source cannot be reached, or refuses. `parents`: as in Reserve.
    """

    keys: list[bytes]
    source: str
    parents: list[bytes]
    wait_ms: int = 0
