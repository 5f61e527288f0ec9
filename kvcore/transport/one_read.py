"""One whole object in one Read: the usual get, without what batches need."""

from collections.abc import Sequence

from kvcore.errors import RemoteProtocolError
from kvcore.transport.channel import Channel, Outcome
from kvcore.transport.checksums import LARGE_READ_BYTES, RunningSums, differs, is_corrupt, split_layers
from kvcore.transport.parts import OK_CODE, Sink, drop, failure_of, status_of
from kvcore.wire.messages import Read, ReadReply, Remove, Status


class OneRead:
    """`sink` is asked with index 0. `moved_bytes`: of a read that has ended well."""

    __slots__ = ("_key", "_running", "_sink", "_verify", "_views", "moved_bytes")

    def __init__(self, key: bytes, sink: Sink, verify: bool) -> None:
        self.moved_bytes = 0
        self._key = key
        self._sink = sink
        self._verify = verify
        self._views: Sequence[memoryview] | None = None
        self._running: RunningSums | None = None

    def run(self, channel: Channel, deadline: float) -> Status:
        outcome = channel.ask(Read, ([self._key],), deadline, place=self._place, moved=self._moved)
        status = self._judge(outcome)
        if status is Status.CORRUPT:
            # Left there it could neither be read nor be written again.
            channel.forget(Remove, ([self._key],))
        return status

    def _place(self, reply: ReadReply, payload_bytes: int) -> Sequence[memoryview]:
        if len(reply.statuses) != 1 or reply.sizes_bytes != [payload_bytes]:
            raise RemoteProtocolError("a ReadReply that does not fit its request of 1 key")
        if reply.statuses[0] != OK_CODE:
            return drop(payload_bytes)
        self._views = views = self._sink(0, payload_bytes)
        if views is None:
            return drop(payload_bytes)
        if payload_bytes > LARGE_READ_BYTES and self._verify and reply.checksums:
            self._running = RunningSums(split_layers(views, len(reply.checksums)))
        return views

    def _moved(self, size_bytes: int) -> None:
        if self._running is not None:
            self._running.add(size_bytes)

    def _judge(self, outcome: Outcome) -> Status:
        if not isinstance(outcome, ReadReply):
            return failure_of(outcome)
        if outcome.statuses[0] != OK_CODE:
            return status_of(outcome.statuses[0])
        if self._views is None:
            return Status.INVALID
        if self._verify and self._is_corrupt(self._views, outcome.checksums):
            return Status.CORRUPT
        self.moved_bytes = outcome.sizes_bytes[0]
        return Status.OK

    def _is_corrupt(self, views: Sequence[memoryview], expected: Sequence[int]) -> bool:
        if self._running is None:
            return is_corrupt(views, expected)
        return differs(expected, self._running.sums)
