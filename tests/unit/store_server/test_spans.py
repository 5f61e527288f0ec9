from hypothesis import given
from hypothesis import strategies as st

from kvcore.wire.messages import Put
from store_server.core.objects import StoredObject
from store_server.core.spans import layer_spans, merge_neighbours
from store_server.core.writes import Incoming
from store_server.payload import PayloadViews


def test_layers_of_a_scattered_object() -> None:
    obj = StoredObject(b"k", 100, 10, (1000, 45, 3000, 30, 5000, 25))
    assert layer_spans(obj, 0, 10) == [(1000, 45), (3000, 30), (5000, 25)]
    assert layer_spans(obj, 4, 5) == [(1040, 5), (3000, 5)]
    assert layer_spans(obj, 7, 8) == [(3025, 5), (5000, 5)]
    assert layer_spans(obj, 9, 10) == [(5015, 10)]


@given(
    st.integers(1, 6),
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.data(),
)
def test_spans_of_layers_are_slices_of_the_object(
    num_layers: int, pieces: list[int], data: st.DataObject
) -> None:
    size = sum(pieces) * num_layers
    extents, offset = [], 0
    for piece in pieces:
        offset += data.draw(st.integers(0, 20))
        extents += [offset, piece * num_layers]
        offset += piece * num_layers
    pool = bytes(index % 251 for index in range(offset))
    value = b"".join(pool[extents[i] : extents[i] + extents[i + 1]] for i in range(0, len(extents), 2))
    obj = StoredObject(b"k", size, num_layers, tuple(extents))
    begin = data.draw(st.integers(0, num_layers - 1))
    end = data.draw(st.integers(begin + 1, num_layers))
    spans = layer_spans(obj, begin, end)
    found = b"".join(pool[offset : offset + count] for offset, count in spans)
    assert found == value[begin * size // num_layers : end * size // num_layers]
    merged = merge_neighbours(spans)
    assert len(merged) <= len(spans)
    assert b"".join(pool[offset : offset + count] for offset, count in merged) == found


def test_a_payload_goes_to_its_objects_and_the_rest_to_nobody() -> None:
    pool = bytearray(1000)
    views = PayloadViews(memoryview(pool))
    incoming = Incoming(Put(1, [b"a", b"b", b"c", b"d"], [10, 300_000, 20, 30]), b"")
    incoming.objects = [
        StoredObject(b"a", 10, 1, (100, 10)),
        None,
        StoredObject(b"c", 20, 1, (110, 20)),
        StoredObject(b"d", 30, 1, (130, 30)),
    ]
    payload = b"a" * 10 + b"b" * 300_000 + b"c" * 20 + b"d" * 30
    targets = views.targets(incoming, [10, 300_000, 20, 30])
    assert sum(map(len, targets)) == len(payload)
    assert len(targets[-1]) == 50, "neighbours are received at once"
    for target in targets:
        target[:] = payload[: len(target)]
        payload = payload[len(target) :]
    assert pool[100:160] == b"a" * 10 + b"c" * 20 + b"d" * 30
    assert not any(pool[:100]) and not any(pool[160:])
