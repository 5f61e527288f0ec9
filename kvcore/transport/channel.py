"""What a plane needs of the control connection: start a request, wait for its answer.

kvcore.client.connection.Connection is the real one; tests hand planes a scripted one.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvcore.transport.checksums import LateSums
from kvcore.wire.messages import Message, ReadReply, Reply, Status

# An answer of the store; TIMED_OUT or UNAVAILABLE when there is none.
Outcome = Reply | Status

# Where the payload of an answer goes: views whose sizes add up to at most payload_bytes. Called by whichever
# thread receives; must not block. RemoteProtocolError when the answer does not fit the request.
Place = Callable[[ReadReply, int], Sequence[memoryview]]
# Told, if the payload is a large one, how many more of its bytes are in their place.
Moved = Callable[[int], None]


class Call:
    """One request in flight. `outcome` is None until it has an answer or will never have one."""

    __slots__ = (
        "abandoned",
        "asked_at",
        "gate",
        "moved",
        "outcome",
        "place",
        "reply",
        "request_id",
        "sent_at",
        "wait_s",
    )

    def __init__(self, place: Place | None = None, moved: Moved | None = None, wait_s: float = 0.0) -> None:
        self.place = place
        self.moved = moved
        self.wait_s = wait_s  # how long the store was asked to take
        self.sent_at = 0.0
        self.asked_at = 0.0  # when the last byte of it had been sent: no answer is due before
        self.request_id = 0
        self.outcome: Outcome | None = None
        self.reply: Reply | None = None  # its head has arrived, its payload not yet
        self.abandoned = False
        self.gate: threading.Lock | None = None


class Channel(Protocol):
    """All methods are thread-safe. Deadlines are in seconds of time.monotonic()."""

    max_payload_bytes: int
    max_keys: int

    def still_open(self) -> bool:
        """Whether neither end has closed. While that is so the store keeps our leases and reservations."""
        ...

    def start(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        *,
        payload: Sequence[memoryview] = (),
        sums: LateSums | None = None,
        place: Place | None = None,
        moved: Moved | None = None,
        stall_s: float = 5.0,
        wait_s: float = 0.0,
    ) -> Call:
        """Sends `kind(id, *fields)`, then `payload`, then `sums` of it if they are wanted, as u64 in little
        endian; they are computed on the way. Gives up when the store takes nothing for `stall_s`.
        `wait_s`: how long the request itself asks the store to wait."""
        ...

    def ask(
        self,
        kind: type[Message],
        fields: tuple[object, ...],
        deadline: float,
        *,
        place: Place | None = None,
        moved: Moved | None = None,
    ) -> Outcome:
        """`start` and `wait` in one."""
        ...

    def forget(self, kind: type[Message], fields: tuple[object, ...]) -> None:
        """Sends a request whose answer nobody will wait for."""
        ...

    def wait(self, call: Call, deadline: float) -> Outcome:
        """After TIMED_OUT the places of the call are not written to any more."""
        ...

    def poll(self, call: Call) -> bool:
        """Receives what is there without blocking; True when `wait` would return at once."""
        ...

    def close(self) -> None:
        """Ends the connection: reservations, leases and whatever is in flight end with it."""
        ...
