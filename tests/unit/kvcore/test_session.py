import pytest

from kvcore.errors import LocalProtocolError, RemoteProtocolError
from kvcore.wire import messages as m
from kvcore.wire.codec import Frame
from kvcore.wire.session import ANSWERS, REPLIES, REQUESTS, ClientSession, Phase, ServerSession

HELLO_REPLY = m.HelloReply(1, m.PROTOCOL_VERSION, "server", ["tcp"], 1000, 2000, 128, 5000)


def frame_of(message: m.Message, payload_bytes: int = 0) -> Frame:
    return Frame(message, message.id, payload_bytes)


def open_session() -> ClientSession[str]:
    session: ClientSession[str] = ClientSession()
    assert session.start(m.Hello, "hello") == 1
    assert session.receive(frame_of(HELLO_REPLY)) == "hello"
    return session


def test_tables_cover_every_message():
    assert set(ANSWERS) == set(m.Request.__args__)
    assert set(ANSWERS.values()) | {m.ErrorReply} == set(m.Reply.__args__)
    assert set(REQUESTS) == set(REPLIES) == set(Phase)


def test_the_greeting_agrees_on_limits():
    session = open_session()
    assert session.phase is Phase.OPEN
    assert (session.max_body_bytes, session.max_payload_bytes, session.max_keys) == (1000, 2000, 128)


def test_hello_comes_first_and_once():
    session: ClientSession[str] = ClientSession()
    with pytest.raises(LocalProtocolError, match="Lookup cannot be sent while new"):
        session.start(m.Lookup, "x")
    session.start(m.Hello, "hello")
    with pytest.raises(LocalProtocolError, match="while greeting"):
        session.start(m.Hello, "again")


def test_a_refusal_closes():
    session: ClientSession[str] = ClientSession()
    session.start(m.Hello, "hello")
    assert session.receive(frame_of(m.ErrorReply(1, m.ErrorCode.BAD_TOKEN, "no"))) == "hello"
    assert session.phase is Phase.CLOSED


def test_answers_are_paired_in_any_order():
    session = open_session()
    ids = {name: session.start(m.Exists, name) for name in "abc"}
    assert session.receive(frame_of(m.StatusReply(ids["b"], b""))) == "b"
    assert session.receive(frame_of(m.ErrorReply(ids["a"], 6, ""))) == "a"
    assert session.num_pending == 1
    session.cancel(ids["c"])
    assert session.close() == []


def test_orphans_are_handed_back():
    session = open_session()
    session.start(m.Stats, "a")
    session.start(m.Stats, "b")
    assert sorted(session.close()) == ["a", "b"]


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(m.Ack(99)),
        Frame(None, 2, 0),
        frame_of(m.Ack(2)),
        frame_of(m.StatusReply(2, b""), 5),
        frame_of(m.HelloReply(2, 1, "", [], 1, 1, 1, 1)),
    ],
)
def test_answers_nobody_asked_for_end_the_connection(frame):
    session = open_session()
    assert session.start(m.Exists, "x") == 2
    with pytest.raises(RemoteProtocolError):
        session.receive(frame)


@pytest.mark.parametrize(
    "reply",
    [
        m.HelloReply(1, m.PROTOCOL_VERSION + 1, "server", ["tcp"], 1000, 2000, 128, 5000),
        m.HelloReply(1, m.PROTOCOL_VERSION, "server", ["tcp"], 1000, 0, 128, 5000),
    ],
)
def test_useless_greetings_are_refused(reply):
    session: ClientSession[str] = ClientSession()
    session.start(m.Hello, "hello")
    with pytest.raises(RemoteProtocolError):
        session.receive(frame_of(reply))
    assert session.close() == ["hello"]


def hello(version: int = m.PROTOCOL_VERSION, token: str = "") -> Frame:
    return frame_of(m.Hello(1, version, "client", ["tcp"], token))


def test_server_admits_those_who_greet():
    session = ServerSession(tokens=("secret", "other"), max_keys=2)
    assert session.judge(hello(token="secret")) is None
    session.greeted()
    assert session.judge(frame_of(m.Exists(2, [b"a", b"b"]))) is None
    assert session.judge(frame_of(m.Put(3, [b"a"], [1]), 1)) is None


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (hello(version=9), m.ErrorCode.VERSION),
        (hello(token="wrong"), m.ErrorCode.BAD_TOKEN),
        (frame_of(m.Stats(1)), m.ErrorCode.BAD_REQUEST),
    ],
)
def test_server_closes_on_a_bad_greeting(frame, code):
    session = ServerSession(tokens=("secret",))
    reply = session.judge(frame)
    assert reply is not None and (reply.id, reply.code) == (1, code)
    assert session.phase is Phase.CLOSED


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (Frame(None, 5, 3), m.ErrorCode.UNKNOWN_MESSAGE),
        (frame_of(m.Exists(5, [b""] * 3)), m.ErrorCode.OVER_LIMIT),
        (frame_of(m.Stats(5), 3), m.ErrorCode.BAD_REQUEST),
    ],
)
def test_server_refuses_a_request_and_goes_on(frame, code):
    session = ServerSession(max_keys=2)
    assert session.judge(hello()) is None
    session.greeted()
    reply = session.judge(frame)
    assert reply is not None and (reply.id, reply.code) == (5, code)
    assert session.phase is Phase.OPEN
