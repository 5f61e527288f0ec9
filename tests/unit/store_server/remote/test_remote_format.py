"""Names and bytes of objects on the remote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.transport.checksums import layer_checksums
from kvcore.wire.messages import Tier
from store_server.core.tiering import ColdObject
from store_server.remote.format import CorruptObject, decode_into, encode, name_of, parse_name

KEY = bytes(range(32))


@given(st.binary(min_size=1, max_size=255), st.integers(1, 1 << 20), st.integers(1, 1 << 44))
def test_a_name_tells_everything(key: bytes, num_layers: int, size_bytes: int) -> None:
    name = name_of(key, num_layers, size_bytes)
    assert parse_name(name) == (key, ColdObject(size_bytes, num_layers, Tier.REMOTE))
    assert all(len(segment) <= 255 for segment in name.split("/"))


@pytest.mark.parametrize(
    "name",
    ["", "readme", "ab/cd", "ab/xy.1.1", "ab/cd.1", "ab/cd.1.1.1", "ab/cd.0.1", "ab/cd.1.-1", "ab/.1.1"],
)
def test_names_of_others_are_not_ours(name: str) -> None:
    assert parse_name(name) is None


@given(st.binary(min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 300), st.data())
def test_bytes_come_back_whatever_pieces_they_lie_in(
    key: bytes, num_layers: int, layer_bytes: int, data: st.DataObject
) -> None:
    payload = data.draw(st.binary(min_size=num_layers * layer_bytes, max_size=num_layers * layer_bytes))
    cut = data.draw(st.integers(0, len(payload)))
    written = encode(key, num_layers, [memoryview(payload)[:cut], memoryview(payload)[cut:]], ())
    target = bytearray(len(payload))
    cut = data.draw(st.integers(0, len(payload)))
    sums = decode_into(memoryview(written), key, [memoryview(target)[:cut], memoryview(target)[cut:]])
    assert bytes(target) == payload
    assert sums == layer_checksums([memoryview(payload)], num_layers)


@given(st.data())
def test_whatever_changes_is_noticed(data: st.DataObject) -> None:
    payload = bytes(range(200))
    written = bytearray(encode(KEY, 4, [memoryview(payload)], ()))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(written) - 1))
        written[at] ^= data.draw(st.integers(1, 255))
    else:
        del written[data.draw(st.integers(0, len(written) - 1)) :]
    with pytest.raises(CorruptObject):
        decode_into(memoryview(written), KEY, [memoryview(bytearray(200))])


def test_the_object_of_another_key_is_not_taken() -> None:
    written = encode(KEY, 1, [memoryview(b"payload")], ())
    with pytest.raises(CorruptObject, match="another key"):
        decode_into(memoryview(written), KEY[::-1], [memoryview(bytearray(7))])
