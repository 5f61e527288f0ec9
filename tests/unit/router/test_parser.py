"""The client-side parser: however the bytes are cut, the same requests come out."""

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.http.limits import HttpLimits
from router.http.parser import BadRequest, Phase, RequestParser
from router.http.request import Request, expects_continue, upstream_head

LIMITS = HttpLimits(max_header_bytes=4096, max_body_bytes=4096)


class Feeder:
    def __init__(self, limits: HttpLimits = LIMITS) -> None:
        self.requests: list[Request] = []
        self.awaited: list[Request] = []
        self.parser = RequestParser(limits, self.requests.append, self.awaited.append)


def outcome(pieces: list[bytes], limits: HttpLimits = LIMITS) -> tuple[list[Request], int]:
    """The requests, and the status of the refusal (0: none)."""
    feeder = Feeder(limits)
    try:
        for piece in pieces:
            feeder.parser.feed(piece)
    except BadRequest as refusal:
        return feeder.requests, refusal.status
    return feeder.requests, 0


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


token = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_", min_size=1, max_size=12).map(str.encode)
value = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30).map(str.encode)
reserved = {
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"upgrade",
    b"expect",
    b"trailer",
    b"keep-alive",
    b"te",
    b"host",
    b"proxy-connection",
    b"http2-settings",
}
header = st.tuples(token.filter(lambda name: name.lower() not in reserved), value)


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
    """Raw bytes of one valid request, and what must come out of them."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE"]))
    target = b"/" + draw(token) + draw(st.sampled_from([b"", b"?a=b", b"/x%20y"]))
    headers = draw(st.lists(header, max_size=6))
    body = draw(st.binary(max_size=200))
    lines = b"".join(b"%b: %b\r\n" % line for line in headers)
    offer = draw(st.sampled_from([b"", b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"]))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(body)))
        chunks = [piece for piece in (body[:at], body[at:]) if piece]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in chunks) + b"0\r\n\r\n"
        framing = b"Transfer-Encoding: chunked\r\n"
    else:
        framed, framing = body, b"Content-Length: %d\r\n" % len(body)
    raw = b"%b %b HTTP/1.1\r\nHost: here\r\n%b%b%b\r\n%b" % (method, target, lines, offer, framing, framed)
    return raw, target, headers, body


@settings(max_examples=300, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_of_valid_requests_gives_the_same_requests(
    made: list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]], cuts: list[int]
) -> None:
    data = b"".join(raw for raw, *_ in made)
    parsed, status = outcome(cut(data, cuts))
    assert status == 0 and len(parsed) == len(made)
    for request, (_, target, headers, body) in zip(parsed, made, strict=True):
        assert request.target == target
        assert request.path == target.split(b"?")[0]
        assert request.body == body
        assert request.forward_lines == b"".join(b"%b: %b\r\n" % line for line in headers)
        assert request.keep_alive


@settings(max_examples=300, deadline=None)
@given(
    requests(),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=6)), min_size=1, max_size=3),
    st.lists(st.integers(0, 10_000), max_size=6),
)
def test_any_cut_of_damaged_requests_gives_the_same_outcome(
    made: tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes],
    damage: list[tuple[int, bytes]],
    cuts: list[int],
) -> None:
    data = made[0]
    for at, junk in damage:
        at %= len(data) + 1
        data = data[:at] + junk + data[at + len(junk) :]
    whole, pieces = outcome([data]), outcome(cut(data, cuts))
    assert [(r.method, r.target, r.forward_lines, r.body) for r in pieces[0]] == [
        (r.method, r.target, r.forward_lines, r.body) for r in whole[0]
    ]
    assert pieces[1] == whole[1]


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=4))
def test_arbitrary_bytes_are_requests_or_a_refusal_never_a_crash(data: bytes, cuts: list[int]) -> None:
    _, status = outcome(cut(data, cuts))
    assert status in (0, 400, 405, 413, 417, 431)


@settings(max_examples=200, deadline=None)
@given(requests())
def test_what_is_forwarded_parses_to_the_same_request(
    made: tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes],
) -> None:
    """No smuggling: the engine's parser sees one request, the one that was routed."""
    ((request,), _) = outcome([made[0]])
    forwarded = upstream_head(request, b"host: engine:1\r\n", b"x-request-id: 1\r\n", len(request.body))
    ((again,), status) = outcome([forwarded + request.body])
    assert status == 0
    assert (again.method, again.target, again.body) == (request.method, request.target, request.body)
    expected = {**request.headers, b"host": b"engine:1", b"content-length": b"%d" % len(request.body)}
    for hop in (b"connection", b"upgrade", b"transfer-encoding"):
        expected.pop(hop, None)
    assert again.headers == {**expected, b"x-request-id": b"1"}


def test_phases_say_what_a_connection_waits_for() -> None:
    feeder = Feeder()
    seen = [feeder.parser.phase]
    for piece in (b"POST /x HT", b"TP/1.1\r\ncontent-length: 2\r\n\r\n", b"a", b"b"):
        feeder.parser.feed(piece)
        seen.append(feeder.parser.phase)
    assert seen == [Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.BODY, Phase.IDLE]


def test_what_follows_a_closing_request_is_not_read() -> None:
    close = b"GET /a HTTP/1.1\r\nconnection: close\r\n\r\n"
    for more in (b"GET /b HTTP/1.1\r\n\r\n", b"junk\x00"):
        for pieces in ([close + more], [close, more]):
            parsed, status = outcome(pieces)
            assert [r.target for r in parsed] == [b"/a"] and status == 0
            assert not parsed[0].keep_alive


def test_http_1_0_expects_nothing() -> None:
    feeder = Feeder()
    feeder.parser.feed(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert [expects_continue(head) for head in feeder.awaited] == [False]
    feeder.parser.feed(b"ab")
    assert [request.body for request in feeder.requests] == [b"ab"]


def test_http_1_0_never_keeps_its_connection() -> None:
    ((request,), _) = outcome([b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"])
    assert request.is_http_1_0 and not request.keep_alive


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"http://host:1/v1/models?x=1", b"/v1/models"), (b"HTTP://host", b"/"), (b"https://h/a", b"/a")],
)
def test_absolute_targets_are_understood(target: bytes, path: bytes) -> None:
    ((request,), _) = outcome([b"GET %b HTTP/1.1\r\n\r\n" % target])
    assert request.path == path and request.target.startswith(path)


def test_a_refused_head_is_refused_however_it_comes() -> None:
    long_head = b"GET /a HTTP/1.1\r\nx: " + b"y" * 5000 + b"\r\n\r\n"
    for size in (1, 100, 6000):
        pieces = [long_head[at : at + size] for at in range(0, len(long_head), size)]
        assert outcome(pieces)[1] == 431


def test_a_body_is_awaited_once() -> None:
    feeder = Feeder()
    feeder.parser.feed(b"POST /x?y HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n")
    assert [expects_continue(head) for head in feeder.awaited] == [True]
    feeder.parser.feed(b"a")
    feeder.parser.feed(b"b")
    (head,), (request,) = feeder.awaited, feeder.requests
    assert (head.path, head.target, head.body) == (b"/x", b"/x?y", b"") and request.body == b"ab"
    feeder.parser.feed(b"POST /x HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nc")
    assert len(feeder.awaited) == 1 and len(feeder.requests) == 2


def test_a_body_is_awaited_also_after_an_offer_to_upgrade() -> None:
    feeder = Feeder()
    offer = b"connection: upgrade\r\nupgrade: h2c\r\n"
    feeder.parser.feed(b"POST /x HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n" % offer)
    feeder.parser.feed(b"ab")
    assert len(feeder.awaited) == 1 and feeder.requests[0].body == b"ab"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(header, max_size=3),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=8),
)
def test_heads_that_come_again_mean_the_same_again(
    headers: list[tuple[bytes, bytes]], sent: list[tuple[int, int]]
) -> None:
    """On one connection, with bodies of other lengths and other heads in between, as on one for each."""
    limits = HttpLimits(max_body_bytes=250)
    lines = b"".join(b"%b: %b\r\n" % line for line in headers)
    pieces = []
    for size, kind in sent:
        length = b"content-length:%d\r\n" if kind == 1 else b"Content-Length: %d\r\n"
        head = b"POST /x%d HTTP/1.1\r\nHost: h\r\n%b%b\r\n" % (kind // 2, length % size, lines)
        pieces.append((b"\r\n" if kind == 3 else b"") + head + b"b" * size)
    together, alone = outcome(pieces, limits), [outcome([piece], limits) for piece in pieces]
    accepted = list(itertools.takewhile(lambda one: not one[1], alone))
    assert together[0] == [request for found, _ in accepted for request in found]
    assert together[1] == (alone[len(accepted)][1] if len(accepted) < len(alone) else 0)


def test_a_head_that_comes_again_is_not_taken_for_the_one_before() -> None:
    """Each of these differs from the first in what matters, though all look much alike."""
    first = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    odd = {
        first.replace(b"/a", b"/b"): 0,
        first.replace(b"Host: h\r\n", b"Host: h\r\nContent-Length: 2\r\n"): 400,
        first.replace(b"Host: h\r\n", b"Host: h\r\nTransfer-Encoding: chunked\r\n"): 400,
        first.replace(b"Host: h\r\n", b"Host: h\r\nExpect: something\r\n"): 417,
        first.replace(b"Length: 2", b"Length: -2"): 400,
        first.replace(b"Length: 2\r\n\r\n{}", b"Length: 4097\r\n\r\n" + b"x" * 4097): 413,
    }
    for second, expected in odd.items():
        parsed, status = outcome([first, first, second])
        assert status == expected, second
        assert len(parsed) == 2 + (expected == 0), second
    closing = first.replace(b"Host: h\r\n", b"Host: h\r\nConnection: close\r\n")
    assert len(outcome([closing, closing])[0]) == 1


def test_a_body_in_tiny_chunks_takes_little_more_than_its_bytes() -> None:
    feeder = Feeder(HttpLimits())
    feeder.parser.feed(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    pieces = [bytes([65 + length]) * length for length in (1, 2, 3, 4, 5)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    tracemalloc.start()
    try:
        for _ in range(4_000):
            feeder.parser.feed(chunks)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    body = b"".join(pieces) * 4_000
    assert taken < 2 * len(body)
    feeder.parser.feed(b"0\r\n\r\n")
    assert feeder.requests[0].body == body


def test_bytes_that_came_with_other_requests_are_not_counted_as_the_end_of_a_body() -> None:
    whole = b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    begun = whole[:-12]
    feeder = Feeder()
    feeder.parser.feed(begun)
    for _ in range(3):
        feeder.parser.feed(whole[-12:] + whole * 100 + begun)
    feeder.parser.feed(whole[-12:])
    assert [request.body for request in feeder.requests] == [b"x"] * 304
