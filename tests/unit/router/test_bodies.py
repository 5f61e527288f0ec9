"""Bodies of the legs: only what must differ differs, everything else keeps its bytes."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocols.bodies import prefill_fields, read_fields, with_transfer_params, write_fields

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=6)


@given(BODIES)
def test_unchanged_fields_keep_their_value(body: dict[str, object]) -> None:
    raw = json.dumps(body).encode()
    assert json.loads(write_fields(read_fields(raw))) == body
    prefill = json.loads(write_fields(prefill_fields(read_fields(raw))))
    own = {"stream", "max_tokens", "max_completion_tokens", "n"}
    dropped = {"stream_options", "min_tokens", "min_completion_tokens", "best_of"}
    assert {k: v for k, v in prefill.items() if k not in own} == {
        k: v for k, v in body.items() if k not in own | dropped
    }
    assert prefill["stream"] is False and prefill["max_tokens"] == 1


def test_values_keep_their_very_bytes() -> None:
    raw = b'{"temperature": 1.50, "prompt": "\\u00e9\\/", "big": 123456789012345678901234567890, "a" : [ 1 ]}'
    written = write_fields(read_fields(raw))
    for piece in (b"1.50", b'"\\u00e9\\/"', b"123456789012345678901234567890", b"[ 1 ]"):
        assert piece in written


def test_optional_fields_are_not_invented() -> None:
    prefill = json.loads(write_fields(prefill_fields(read_fields(b'{"prompt":"x"}'))))
    assert prefill == {"prompt": "x", "stream": False, "max_tokens": 1}


@pytest.mark.parametrize(
    ("given_params", "kept"),
    [(None, {}), ("missing", {}), ([1], {}), ({"a": [1.5]}, {"a": [1.5]}), ({"name": "old"}, {})],
)
def test_transfer_params_join_those_of_the_client(given_params: object, kept: dict[str, object]) -> None:
    body = {} if given_params == "missing" else {"kv_transfer_params": given_params}
    fields = with_transfer_params(read_fields(json.dumps(body).encode()), {"name": {"role": "decode"}})
    assert json.loads(write_fields(fields))["kv_transfer_params"] == {**kept, "name": {"role": "decode"}}


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"{} {}", b'{"a": }'])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_fields(raw)
