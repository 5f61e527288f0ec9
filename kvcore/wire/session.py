"""What may be sent when, as tables: the two ends of a session, sans-IO.

    NEW --Hello--> GREETING --HelloReply--> OPEN --any request--> OPEN
                       `------ErrorReply--> CLOSED

The client's end pairs answers with requests, whatever their order; the server's end judges requests.
"""

import enum
import hmac
import itertools
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvcore.errors import LocalProtocolError, RemoteProtocolError, RequestRefused, StoreUnavailable
from kvcore.wire import messages as m
from kvcore.wire.codec import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_PAYLOAD_BYTES, Frame

C = TypeVar("C")


class Phase(enum.Enum):
    NEW = "new"
    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


# Request -> the answer it gets (or an ErrorReply).
ANSWERS: dict[type[m.Message], type[m.Message]] = {
    m.Hello: m.HelloReply,
    m.Lookup: m.LookupReply,
    m.Exists: m.StatusReply,
    m.Put: m.StatusReply,
    m.Reserve: m.ReserveReply,
    m.Write: m.StatusReply,
    m.Commit: m.StatusReply,
    m.Abort: m.StatusReply,
    m.Read: m.ReadReply,
    m.Await: m.StatusReply,
    m.Acquire: m.AcquireReply,
    m.Renew: m.Ack,
    m.Release: m.Ack,
    m.Pin: m.StatusReply,
    m.Unpin: m.StatusReply,
    m.Remove: m.StatusReply,
    m.Evict: m.EvictReply,
    m.ListKeys: m.ListKeysReply,
    m.Stats: m.StatsReply,
    m.Drain: m.DrainReply,
    m.Verify: m.VerifyReply,
    m.Describe: m.DescribeReply,
    m.ChangeReplica: m.StatusReply,
    m.Resolve: m.ResolveReply,
    m.CopyFrom: m.StatusReply,
    m.ConnectQueuePair: m.ConnectQueuePairReply,
    m.DisconnectQueuePair: m.Ack,
}
WITH_PAYLOAD: frozenset[type[m.Message]] = frozenset({m.Put, m.Write, m.ReadReply})

# Phase -> requests a client may send in it -> the phase that follows.
REQUESTS: dict[Phase, dict[type[m.Message], Phase]] = {
    Phase.NEW: {m.Hello: Phase.GREETING},
    Phase.GREETING: {},
    Phase.OPEN: {request: Phase.OPEN for request in ANSWERS if request is not m.Hello},
    Phase.CLOSED: {},
}
# Phase -> answers a client may get in it -> the phase that follows.
REPLIES: dict[Phase, dict[type[m.Message], Phase]] = {
    Phase.NEW: {},
    Phase.GREETING: {m.HelloReply: Phase.OPEN, m.ErrorReply: Phase.CLOSED},
    Phase.OPEN: {
        **{answer: Phase.OPEN for answer in ANSWERS.values() if answer is not m.HelloReply},
        m.ErrorReply: Phase.OPEN,
    },
    Phase.CLOSED: {},
}


class ClientSession(Generic[C]):
    """The client's end. `C` is whatever the shell wants back with the answer of a request.

    A request stays pending until its answer arrives, also when nobody waits for it any more: only so can a
    late answer be told from one that nobody asked for. Not thread-safe.
    """

    def __init__(self) -> None:
        self._enter(Phase.NEW)
        self.server_id = ""
        self.planes: list[str] = []
        self.max_body_bytes = DEFAULT_MAX_BODY_BYTES
        self.max_payload_bytes = DEFAULT_MAX_PAYLOAD_BYTES
        self.max_keys = 1
        self.default_lease_ms = 0
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[type[m.Message], C]] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def start(self, request: type[m.Message], context: C) -> int:
        """Registers a request about to be sent and returns its id."""
        following = self._requests.get(request)
        if following is None:
            raise LocalProtocolError(f"{request.__name__} cannot be sent while {self.phase.value}")
        if following is not self.phase:
            self._enter(following)
        request_id = next(self._ids)
        self._pending[request_id] = (ANSWERS[request], context)
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forgets a request that was never sent."""
        del self._pending[request_id]

    def receive(self, frame: Frame[m.Reply]) -> C:
        """The context of the request that `frame` answers. RemoteProtocolError: an answer nobody asked for,
        or of the wrong kind; the connection is then of no more use."""
        reply = frame.message
        expected, context = self._pending.get(frame.request_id, (None, None))
        if expected is None or reply is None:
            raise RemoteProtocolError(f"an answer to request {frame.request_id}, which is not pending")
        kind = type(reply)
        following = self._replies.get(kind)
        if following is None or (kind is not expected and kind is not m.ErrorReply):
            raise RemoteProtocolError(f"{kind.__name__} instead of {expected.__name__}")
        if frame.payload_bytes and kind not in WITH_PAYLOAD:
            raise RemoteProtocolError(f"{kind.__name__} with a payload of {frame.payload_bytes} bytes")
        if isinstance(reply, m.HelloReply):
            self._agree(reply)
        del self._pending[frame.request_id]
        if following is not self.phase:
            self._enter(following)
        return context  # type: ignore[return-value]

    def close(self) -> list[C]:
        """Ends the session; returns the contexts of what will never be answered."""
        self._enter(Phase.CLOSED)
        orphans = [context for _, context in self._pending.values()]
        self._pending.clear()
        return orphans

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._requests, self._replies = REQUESTS[phase], REPLIES[phase]

    def _agree(self, reply: m.HelloReply) -> None:
        if reply.version != m.PROTOCOL_VERSION:
            raise RemoteProtocolError(f"the store speaks version {reply.version}, not {m.PROTOCOL_VERSION}")
        if min(reply.max_body_bytes, reply.max_payload_bytes, reply.max_keys) < 1:
            raise RemoteProtocolError("the store's limits leave no room for any request")
        self.server_id, self.planes = reply.server_id, reply.planes
        self.max_body_bytes, self.max_payload_bytes = reply.max_body_bytes, reply.max_payload_bytes
        self.max_keys, self.default_lease_ms = reply.max_keys, reply.default_lease_ms


class ServerSession:
    """The server's end: says of each request whether it may be carried out. Any of `tokens` is good; without
    any ("" does not count) everybody is admitted."""

    def __init__(self, *, tokens: Sequence[str] = (), max_keys: int = 1 << 16) -> None:
        self.phase = Phase.NEW
        self._tokens = [token.encode() for token in tokens if token]
        self._max_keys = max_keys

    def judge(self, frame: Frame[m.Request]) -> m.ErrorReply | None:
        """None: go on. Else the answer to send; the connection ends with it if the phase is then CLOSED.

        The phase goes to GREETING with a good Hello and to OPEN by `greeted`.
        """
        request = frame.message
        if request is None:
            return self._refuse(frame, m.ErrorCode.UNKNOWN_MESSAGE, "unknown message type")
        kind = type(request)
        following = REQUESTS[self.phase].get(kind)
        if following is None:
            self.phase = Phase.CLOSED
            return self._refuse(frame, m.ErrorCode.BAD_REQUEST, f"{kind.__name__} is out of place here")
        if frame.payload_bytes and kind not in WITH_PAYLOAD:
            return self._refuse(frame, m.ErrorCode.BAD_REQUEST, f"{kind.__name__} takes no payload")
        if isinstance(request, m.Hello):
            return self._judge_hello(frame, request)
        num_keys = len(getattr(request, "keys", ()))
        if num_keys > self._max_keys:
            return self._refuse(
                frame, m.ErrorCode.OVER_LIMIT, f"{num_keys} keys in one message, allowed are {self._max_keys}"
            )
        return None

    def greeted(self) -> None:
        """The HelloReply has been sent."""
        self.phase = Phase.OPEN

    def _judge_hello(self, frame: Frame[m.Request], hello: m.Hello) -> m.ErrorReply | None:
        self.phase = Phase.CLOSED
        if hello.version != m.PROTOCOL_VERSION:
            return self._refuse(
                frame,
                m.ErrorCode.VERSION,
                f"this store speaks version {m.PROTOCOL_VERSION} of the protocol, not {hello.version}",
            )
        # All are compared, so that the time it takes tells nothing about any of them.
        matches = [hmac.compare_digest(token, hello.token.encode()) for token in self._tokens]
        if matches and not any(matches):
            return self._refuse(frame, m.ErrorCode.BAD_TOKEN, "the token is not one of this store's")
        self.phase = Phase.GREETING
        return None

    @staticmethod
    def _refuse(frame: Frame[m.Request], code: m.ErrorCode, text: str) -> m.ErrorReply:
        return m.ErrorReply(frame.request_id, code, text)


def refusal(reply: m.ErrorReply) -> RequestRefused:
    return RequestRefused(reply.code, reply.message, reply.retryable)


def ungreeted(reason: str, is_closed: bool) -> StoreUnavailable:
    """Instead of an answer to Hello: whoever frames messages otherwise cannot read it, and hangs up."""
    if is_closed:
        return StoreUnavailable(f"{reason}: is it of another version than this client, or behind tls://?")
    return StoreUnavailable(reason)
