"""From bytes to frames, sans-IO: says where the next bytes should be received, and is told how many came.

The shape fits both a blocking socket (`recv_into` / `recvmsg_into` what `views()` names) and
asyncio.BufferedProtocol (`get_buffer` / `buffer_updated`). Heads of frames are staged; the rest of a payload
is received straight into the memory its owner names, or is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvcore.errors import LocalProtocolError
from kvcore.wire.codec import FRAME_HEADER_BYTES, Frame, FrameDecoder

T = TypeVar("T")

# Small answers arrive whole in one receive; of a large payload only this much is copied a second time.
STAGING_BYTES = 32 << 10
SCRATCH_BYTES = 256 << 10


class Stall:
    """The type of STALL."""


STALL: Final = Stall()
"""What `on_frame` returns when it cannot take the frame yet."""


class FrameReceiver(Generic[T]):
    """One direction of one connection; not thread-safe.

    `on_frame(frame)` is called when a head has arrived and returns where its payload goes: views whose sizes
    add up to at most `frame.payload_bytes` (what they do not hold is dropped), or None to drop it all. With
    STALL the frame is offered again by `resume`; until then nothing should be received.
    `on_end(frame)` is called when the payload, possibly of 0 bytes, is complete. RemoteProtocolError from
    `received` means the connection is of no more use.
    """

    def __init__(
        self,
        decoder: FrameDecoder[T],
        on_frame: Callable[[Frame[T]], Sequence[memoryview] | Stall | None],
        on_end: Callable[[Frame[T]], None],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._decoder = decoder
        self._on_frame = on_frame
        self._on_end = on_end
        self._staging = memoryview(bytearray(staging_bytes))
        self._begin = self._end = 0
        self._scratch: memoryview | None = None
        self._frame: Frame[T] | None = None
        self._targets: list[memoryview] = []
        self._dropped_bytes = 0
        self._is_stalled = False
        self.on_moved: Callable[[int], None] | None = None
        """Told how many bytes of the payload have reached its targets, as they do; `on_frame` may set it."""

    @property
    def in_payload(self) -> bool:
        """Whether the next bytes belong to a payload (then nothing else is staged)."""
        return self._frame is not None

    def views(self) -> list[memoryview]:
        """Where to receive the next bytes, in order; never empty."""
        if self._frame is None:
            return [self._staging[self._end :] if self._end else self._staging]
        if self._targets:
            return self._targets
        if self._scratch is None:
            self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        return [self._scratch[: self._dropped_bytes]]

    def received(self, size_bytes: int) -> None:
        """`size_bytes` bytes have been received into `views()`."""
        if self._frame is None:
            self._end += size_bytes
            if self._is_stalled:
                self._tidy()
            else:
                self._parse()
            return
        if self._targets:
            self._advance(size_bytes)
        else:
            self._dropped_bytes -= size_bytes
        if not self._targets and not self._dropped_bytes:
            frame, self._frame = self._frame, None
            self._on_end(frame)

    def resume(self) -> None:
        """Offer the frame that was stalled again, and go on. RemoteProtocolError as from `received`."""
        self._is_stalled = False
        self._parse()

    def _parse(self) -> None:
        while self._end - self._begin >= FRAME_HEADER_BYTES:
            body_bytes, payload_bytes = self._decoder.decode_header(self._staging, self._begin)
            body_begin = self._begin + FRAME_HEADER_BYTES
            body_end = body_begin + body_bytes
            if body_end > self._end:
                break
            frame = self._decoder.decode_body(self._staging[body_begin:body_end], payload_bytes)
            targets = self._on_frame(frame)
            if isinstance(targets, Stall):
                self._is_stalled = True
                break
            self._begin = body_end
            if payload_bytes and not self._begin_payload(frame, targets):
                break
            self._on_end(frame)
        self._tidy()

    def _tidy(self) -> None:
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == len(self._staging):
            self._make_room()

    def _begin_payload(self, frame: Frame[T], targets: Sequence[memoryview] | None) -> bool:
        """Moves the staged part of the payload; True when that was all of it."""
        staged_end = self._begin + frame.payload_bytes
        one = targets[0] if targets and len(targets) == 1 and self.on_moved is None else None
        if one is not None and len(one) == frame.payload_bytes and staged_end <= self._end:
            one[:] = self._staging[self._begin : staged_end]
            self._begin = staged_end
            return True
        views = [view for view in targets if len(view)] if targets else []
        wanted_bytes = sum(map(len, views))
        if wanted_bytes > frame.payload_bytes:
            raise LocalProtocolError(
                f"{wanted_bytes} bytes of memory given for {frame.payload_bytes} of payload"
            )
        self._targets, self._dropped_bytes = views, frame.payload_bytes - wanted_bytes
        staged = self._staging[self._begin : min(self._end, self._begin + frame.payload_bytes)]
        self._begin += len(staged)
        position = 0
        while self._targets and position < len(staged):
            size = min(len(self._targets[0]), len(staged) - position)
            self._targets[0][:size] = staged[position : position + size]
            self._advance(size)
            position += size
        self._dropped_bytes -= len(staged) - position
        if not self._targets and not self._dropped_bytes:
            return True
        self._frame = frame
        return False

    def _advance(self, size_bytes: int) -> None:
        if self.on_moved is not None:
            self.on_moved(size_bytes)
        targets, whole = self._targets, 0
        for view in targets:
            if size_bytes < len(view):
                break
            size_bytes -= len(view)
            whole += 1
        del targets[:whole]
        if size_bytes:
            targets[0] = targets[0][size_bytes:]

    def _make_room(self) -> None:
        # Grown step by step: a header alone must not make us allocate what it promises.
        kept = self._end - self._begin
        size = len(self._staging) * 2 if kept == len(self._staging) else len(self._staging)
        fresh = memoryview(bytearray(size))
        fresh[:kept] = self._staging[self._begin : self._end]
        self._staging, self._begin, self._end = fresh, 0, kept
