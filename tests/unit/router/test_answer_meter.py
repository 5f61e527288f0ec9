"""What is counted of an answer that passes by."""

import pytest

from router.http.answer_meter import AnswerMeter, count_output_tokens


def test_bytes_pass_and_the_first_event_is_told_once() -> None:
    passed: list[bytes] = []
    firsts: list[int] = []
    meter = AnswerMeter(passed.append, lambda: firsts.append(len(passed)))
    pieces = [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"data: {}\n\n",
        b"data: {}\n\ndata: {}\n\n",
        b"\n",
        b"data: [DONE]\n\n",
    ]
    for piece in pieces:
        meter.write(piece)
    assert passed == pieces and firsts == [1] and meter.num_events == 4


@pytest.mark.parametrize(
    ("last", "events", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 5, "completion_tokens": 7}}', 0, 7),
        (b'{"text": "\\"completion_tokens\\": 9", "usage":{"completion_tokens":3}}', 0, 3),
        (b'"completion_tokens": 9' + b" " * 4096, 5, 4),
        (b"data: [DONE]\n\n", 5, 4),
        (b"", 0, 0),
    ],
)
def test_output_tokens(last: bytes, events: int, tokens: int) -> None:
    assert count_output_tokens(last, events) == tokens
