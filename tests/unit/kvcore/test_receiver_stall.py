"""A receiver that is told to wait: nothing is lost, nothing is taken twice, whatever the pieces of the
stream."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.codec import Frame, encode_frame, request_decoder
from kvcore.wire.messages import Exists, Put, Request
from kvcore.wire.receiver import STALL, FrameReceiver, Stall


class Taker:
    """Refuses frames as long as `open` is False."""

    def __init__(self) -> None:
        self.open = True
        self.values: list[bytes] = []
        self._target = bytearray()
        self.receiver = FrameReceiver[Request](
            request_decoder(), self.on_frame, self.on_end, staging_bytes=64
        )

    def on_frame(self, frame: Frame[Request]) -> Sequence[memoryview] | Stall | None:
        if not self.open:
            return STALL
        self._target = bytearray(frame.payload_bytes)
        return [memoryview(self._target)]

    def on_end(self, frame: Frame[Request]) -> None:
        self.values.append(bytes(self._target))

    def feed(self, data: bytes) -> None:
        while data:
            view = self.receiver.views()[0]
            size = min(len(view), len(data))
            view[:size] = data[:size]
            self.receiver.received(size)
            data = data[size:]


@given(
    st.lists(st.binary(max_size=300), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=12),
)
def test_values_arrive_whole_and_in_order(values: list[bytes], cuts: list[tuple[int, bool]]) -> None:
    stream = b"".join(
        encode_frame(Put(number, [b"k"], [len(value)]), len(value)) + value
        for number, value in enumerate(values)
    )
    taker = Taker()
    for size, is_open in [*cuts, (len(stream), True)]:
        if is_open and not taker.open:
            taker.open = True
            taker.receiver.resume()
        taker.open = is_open
        piece, stream = stream[:size], stream[size:]
        taker.feed(piece)
    assert taker.values == values


def test_a_stalled_frame_is_offered_again_and_only_once() -> None:
    taker = Taker()
    taker.open = False
    taker.feed(encode_frame(Exists(1, [b"a" * 200])) + encode_frame(Exists(2, [b"b"])))
    assert taker.values == []
    taker.receiver.resume()
    assert taker.values == []
    taker.open = True
    taker.receiver.resume()
    assert taker.values == [b"", b""]
