"""`cached_tokens` in passing bytes: only the number changes, however the bytes are cut."""

import json

from hypothesis import given
from hypothesis import strategies as st

from router.http.cached_tokens import CachedTokensFilter


def passed(data: bytes, cuts: list[int], cached: int | None) -> bytes:
    out: list[bytes] = []
    through = CachedTokensFilter(out.append, lambda: cached)
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    start = 0
    for end in ends:
        through.write(data[start:end])
        start = end
    through.flush()
    return b"".join(out)


def body(cached: int, text: str = "hello") -> bytes:
    usage = {"prompt_tokens": 2000, "prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"choices": [{"text": text}], "usage": usage}).encode()


@given(st.lists(st.integers(0, 400)), st.integers(0, 3000), st.integers(0, 3000))
def test_the_smaller_number_arrives_and_the_length_stays(cuts: list[int], decode: int, prefill: int) -> None:
    sent = body(decode)
    came = passed(sent, cuts, prefill)
    assert len(came) == len(sent)
    expected = json.loads(sent)
    expected["usage"]["prompt_tokens_details"]["cached_tokens"] = min(decode, prefill)
    assert json.loads(came) == expected


@given(st.binary(), st.lists(st.integers(0, 400)))
def test_everything_else_passes_byte_for_byte(data: bytes, cuts: list[int]) -> None:
    assert passed(data, cuts, 1) == data or b'"cached_tokens":' in data


def test_nothing_known_changes_nothing() -> None:
    assert passed(body(1984), [], None) == body(1984)


def test_a_model_that_quotes_the_field_is_not_edited() -> None:
    quoted = '{"cached_tokens": 99, "cached_tokens":99}'
    came = json.loads(passed(body(500, quoted), [], 3))
    assert came["choices"][0]["text"] == quoted
    assert came["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


def test_a_whole_event_is_never_held_back() -> None:
    out: list[bytes] = []
    through = CachedTokensFilter(out.append, lambda: 1)
    event = b'2a\r\ndata: {"choices":[{"text":"a"}]}\n\n\r\n'
    through.write(event)
    assert out == [event]
