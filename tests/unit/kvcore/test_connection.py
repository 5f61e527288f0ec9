"""The blocking connection: pairing, deadlines, roles of threads, and every way it can break."""

import os
import random
import socket
import threading
import time

import pytest

from kvcore.client.connection import Connection
from kvcore.client.silence import Silence
from kvcore.errors import RequestRefused, StoreUnavailable
from kvcore.wire import messages as m
from kvcore.wire.codec import FRAME_HEADER, encode_frame
from kvcore.wire.messages import Status
from tests.unit.kvcore.peer import EchoPeer, Peer

KEY = b"k" * 32
SOON_S = 20.0


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


class Pair:
    """A greeted connection and its peer."""

    def __init__(self, **options) -> None:
        ours, theirs = socket.socketpair()
        self.broken: list[Exception] = []
        self.connection = Connection(ours, self.broken.append, **options)
        self.peer = Peer(theirs)
        greeter = threading.Thread(target=self.peer.greet)
        greeter.start()
        self.connection.greet((m.PROTOCOL_VERSION, "test", ["tcp"]), in_s(SOON_S))
        greeter.join()

    def read(self, buffer: bytearray, wait_s: float = 0.0):
        return self.connection.start(
            m.Read, ([KEY],), place=lambda reply, size: [memoryview(buffer)], wait_s=wait_s
        )

    def close(self) -> None:
        self.connection.close()
        self.peer.socket.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def hasty():
    pair = Pair(silence_s=0.05)
    yield pair
    pair.close()


def read_reply(request_id: int, size: int) -> m.ReadReply:
    return m.ReadReply(request_id, b"\0", [size])


def in_background(function, *args):
    result = []
    thread = threading.Thread(target=lambda: result.append(function(*args)))
    thread.start()
    return thread, result


def test_a_lone_caller_reads_for_itself(pair):
    buffer = bytearray(100_000)
    call = pair.read(buffer)
    request, _ = pair.peer.expect()
    sender = threading.Thread(target=pair.peer.reply, args=(read_reply(request.id, 100_000), b"x" * 100_000))
    sender.start()
    before = threading.active_count()
    outcome = pair.connection.wait(call, in_s(SOON_S))
    assert isinstance(outcome, m.ReadReply) and buffer == b"x" * 100_000
    assert threading.active_count() <= before
    sender.join()
    assert pair.connection.num_pending == 0


def test_answers_overtake_each_other(pair):
    first, second = pair.connection.start(m.Stats, ()), pair.connection.start(m.Stats, ())
    ids = [pair.peer.expect()[0].id for _ in range(2)]
    pair.peer.reply(m.StatsReply(ids[1], {"b": 2}))
    assert pair.connection.wait(second, in_s(SOON_S)).values == {"b": 2}
    assert not pair.connection.poll(first)
    pair.peer.reply(m.StatsReply(ids[0], {"a": 1}))
    assert pair.connection.wait(first, in_s(SOON_S)).values == {"a": 1}


def test_a_follower_takes_over_when_the_leader_is_done(pair):
    calls = [pair.connection.start(m.Stats, ()) for _ in range(3)]
    waits = [in_background(pair.connection.wait, call, in_s(SOON_S)) for call in calls]
    for _ in calls:
        request, _ = pair.peer.expect()
        pair.peer.reply(m.StatsReply(request.id, {"id": request.id}))
    for (thread, result), call in zip(waits, calls, strict=True):
        thread.join(SOON_S)
        assert result[0].values == {"id": call.request_id}


def test_poll_moves_what_is_there_and_wait_goes_on_from_it(pair):
    buffer = bytearray(50_000)
    call = pair.read(buffer)
    request, _ = pair.peer.expect()
    frame = encode_frame(read_reply(request.id, 50_000), 50_000) + b"y" * 50_000
    pair.peer.socket.sendall(frame[:40_000])
    assert not pair.connection.poll(call)
    pair.peer.socket.sendall(frame[40_000:])
    assert pair.connection.poll(call)
    assert pair.connection.wait(call, 0).id == request.id and buffer == b"y" * 50_000


def test_a_late_answer_is_dropped_and_the_next_call_is_served(pair):
    buffer = bytearray(50_000)
    late = pair.read(buffer)
    assert pair.connection.wait(late, in_s(0.02)) is Status.TIMED_OUT
    request, _ = pair.peer.expect()
    answer = (read_reply(request.id, 50_000), b"z" * 50_000)
    sender = threading.Thread(target=pair.peer.reply, args=answer)
    sender.start()
    call = pair.connection.start(m.Stats, ())
    second, _ = pair.peer.expect()
    sender.join()
    pair.peer.reply(m.StatsReply(second.id, {}))
    assert isinstance(pair.connection.wait(call, in_s(SOON_S)), m.StatsReply)
    assert buffer == bytes(50_000) and pair.connection.wait(late, 0) is Status.TIMED_OUT
    assert pair.connection.num_pending == 0 and not pair.connection.broken


def test_a_deadline_in_the_middle_of_a_payload_ends_the_connection(pair):
    buffer = bytearray(1 << 20)
    call = pair.read(buffer)
    other = pair.connection.start(m.Stats, ())
    request, _ = pair.peer.expect()
    pair.peer.socket.sendall(encode_frame(read_reply(request.id, 1 << 20), 1 << 20) + b"h" * 60_000)
    assert pair.connection.wait(call, in_s(0.1)) is Status.TIMED_OUT
    assert pair.connection.broken and len(pair.broken) == 1
    assert pair.connection.wait(other, in_s(SOON_S)) is Status.UNAVAILABLE
    held = bytes(buffer)
    with pytest.raises(OSError):
        for _ in range(100):
            pair.peer.socket.sendall(b"h" * 60_000)
    assert buffer == held


def test_a_followers_deadline_in_its_payload_stops_the_leader_first(pair):
    buffer = bytearray(1 << 20)
    leading = pair.connection.start(m.Stats, ())
    thread, result = in_background(pair.connection.wait, leading, in_s(SOON_S))
    pair.peer.expect()
    call = pair.read(buffer)
    request, _ = pair.peer.expect()
    pair.peer.socket.sendall(encode_frame(read_reply(request.id, 1 << 20), 1 << 20) + b"h" * 60_000)
    while not buffer.startswith(b"h"):
        time.sleep(0.001)
    assert pair.connection.wait(call, in_s(0.05)) is Status.TIMED_OUT
    thread.join(SOON_S)
    assert result == [Status.UNAVAILABLE] and pair.connection.broken


@pytest.mark.parametrize("how", ["close", "garbage", "oversized", "unasked"])
def test_a_broken_connection_fails_everybody_and_is_reported_once(pair, how):
    calls = [pair.connection.start(m.Stats, ()) for _ in range(4)]
    waits = [in_background(pair.connection.wait, call, in_s(SOON_S)) for call in calls]
    for _ in calls:
        pair.peer.expect()
    if how == "close":
        pair.peer.socket.shutdown(socket.SHUT_RDWR)
    elif how == "garbage":
        pair.peer.socket.sendall(FRAME_HEADER.pack(3, 0) + b"\xc1\xc1\xc1")
    elif how == "oversized":
        pair.peer.socket.sendall(FRAME_HEADER.pack(2**32 - 1, 2**60))
    else:
        pair.peer.reply(m.StatsReply(4711, {}))
    for thread, result in waits:
        thread.join(SOON_S)
        assert result == [Status.UNAVAILABLE]
    assert len(pair.broken) == 1
    assert pair.connection.ask(m.Stats, (), in_s(1)) is Status.UNAVAILABLE
    pair.connection.forget(m.Release, (1,))
    assert len(pair.broken) == 1


def test_a_place_that_raises_costs_the_connection_not_the_caller(pair):
    call = pair.connection.start(m.Read, ([KEY],), place=lambda reply, size: [memoryview(b"read-only")])
    request, _ = pair.peer.expect()
    pair.peer.reply(read_reply(request.id, 9), b"123456789")
    assert pair.connection.wait(call, in_s(SOON_S)) is Status.UNAVAILABLE
    assert pair.connection.broken


def test_a_silent_store_is_given_up_after_some_missed_deadlines(hasty):
    misses = 0
    while not hasty.connection.broken:
        assert hasty.connection.ask(m.Stats, (), in_s(0.01)) in (Status.TIMED_OUT, Status.UNAVAILABLE)
        misses += 1
        assert misses < 1000
    assert misses > 1 and "silent" in str(hasty.broken[0])


def test_a_store_asked_to_wait_may_be_silent_for_so_long(hasty):
    waiting = hasty.read(bytearray(1), wait_s=60)
    assert hasty.connection.wait(waiting, in_s(0.2)) is Status.TIMED_OUT
    assert not hasty.connection.broken


def test_slow_is_not_silent():
    silence = Silence(limit_s=1.0, now=0.0)
    assert not silence.missed(now=5.0, due=4.9)
    assert not silence.missed(now=5.8, due=5.7)
    silence.heard(now=5.85)
    assert not silence.missed(now=6.5, due=6.4)
    assert silence.missed(now=7.4, due=7.3)
    silence.heard(now=7.5)
    assert not silence.missed(now=20.0, due=19.5)
    assert silence.missed(now=40.0, due=30.0)


def test_time_in_which_we_send_is_not_the_stores_silence():
    pair = Pair(silence_s=1.0)
    value = memoryview(bytes(8 << 20))

    def take_slowly() -> None:
        taken = 0
        while taken < len(value):
            taken += len(pair.peer.socket.recv(128 << 10))
            time.sleep(0.02)  # 64 times at least: longer than it may be silent

    thread, _ = in_background(take_slowly)
    put = pair.connection.start(m.Put, ([KEY], [len(value)]), payload=[value])
    thread.join(SOON_S)
    assert pair.connection.wait(put, in_s(0.01)) is Status.TIMED_OUT
    assert not pair.connection.broken, "it has only just been asked"
    late = pair.connection.start(m.Stats, ())
    assert pair.connection.wait(late, in_s(1.1)) is Status.TIMED_OUT
    assert pair.connection.broken and "silent" in str(pair.broken[0])
    pair.close()


def test_a_store_that_takes_what_another_thread_sends_is_not_silent():
    pair = Pair(silence_s=1.0)
    value = memoryview(bytes(32 << 20))
    waiting = pair.connection.start(m.Stats, ())
    sender, _ = in_background(
        lambda: pair.connection.start(m.Put, ([KEY], [len(value)]), payload=[value], stall_s=SOON_S)
    )
    taken = 0
    end = in_s(2.0)
    while time.monotonic() < end:
        taken += len(pair.peer.socket.recv(64 << 10))
        time.sleep(0.01)
    assert pair.connection.wait(waiting, in_s(-1)) is Status.TIMED_OUT
    assert taken < len(value) and not pair.connection.broken
    pair.close()
    sender.join(SOON_S)


def test_a_large_request_does_not_lock_up_with_a_large_answer(pair):
    size = 8 << 20
    buffer, value = bytearray(size), os.urandom(size)
    read = pair.read(buffer)
    request, _ = pair.peer.expect()

    def answer_before_reading_on() -> bytes:
        pair.peer.reply(read_reply(request.id, size), value)
        put, payload = pair.peer.expect()
        pair.peer.reply(m.StatusReply(put.id, b"\0"))
        return payload

    thread, received = in_background(answer_before_reading_on)
    put = pair.connection.start(m.Put, ([KEY], [size]), payload=[memoryview(value)])
    assert pair.connection.wait(put, in_s(SOON_S)).statuses == b"\0"
    assert isinstance(pair.connection.wait(read, in_s(SOON_S)), m.ReadReply)
    thread.join(SOON_S)
    assert buffer == value and received == [value]


def test_a_peer_that_takes_nothing_ends_the_request(hasty):
    value = memoryview(bytes(64 << 20))
    half = hasty.connection.start(m.Put, ([KEY], [len(value)]), payload=[value], stall_s=0.05)
    assert hasty.connection.wait(half, in_s(SOON_S)) is Status.UNAVAILABLE
    assert hasty.connection.broken


def test_a_request_that_cannot_even_begin_is_withdrawn(pair):
    value = memoryview(bytes(64 << 20))
    thread, _ = in_background(lambda: pair.connection.start(m.Put, ([KEY], [len(value)]), payload=[value]))
    time.sleep(0.1)
    call = pair.connection.start(m.Stats, (), stall_s=0.02)
    assert call.outcome is Status.TIMED_OUT and not pair.connection.broken
    put, payload = pair.peer.expect()
    assert isinstance(put, m.Put) and len(payload) == len(value)
    thread.join(SOON_S)


def test_thousands_of_pieces_in_and_out(pair):
    pieces = [memoryview(os.urandom(size % 97 + 1)) for size in range(5000)]
    payload = b"".join(pieces)
    thread, received = in_background(pair.peer.expect)
    pair.connection.start(m.Put, ([KEY], [len(payload)]), payload=pieces)
    thread.join(SOON_S)
    assert received[0][1] == payload
    places = [bytearray(len(piece)) for piece in pieces]
    read = pair.connection.start(
        m.Read, ([KEY],), place=lambda reply, size: [memoryview(place) for place in places]
    )
    request, _ = pair.peer.expect()
    thread, _ = in_background(pair.peer.reply, read_reply(request.id, len(payload)), payload)
    assert isinstance(pair.connection.wait(read, in_s(SOON_S)), m.ReadReply)
    thread.join(SOON_S)
    assert places == [bytes(piece) for piece in pieces]


def test_forgotten_requests_leave_nothing_behind(pair):
    echo = EchoPeer(pair.peer, 64)
    echo.start()
    for lease in range(2000):
        pair.connection.forget(m.Release, (lease,))
    pair.connection.ask(m.Exists, ([KEY],), in_s(SOON_S))
    pair.connection.ask(m.Exists, ([KEY],), in_s(SOON_S))
    assert pair.connection.num_pending <= 3


def test_many_threads_never_see_each_others_bytes():
    pair = Pair(silence_s=60)
    echo = EchoPeer(pair.peer, 40_000, seed=7, holds_back=1)
    echo.start()
    wrong: list[object] = []
    stop = in_s(2.5)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < stop:
            key = rng.randbytes(32)
            size = 40_000 // 32 * 32
            buffer = bytearray(size)
            call = pair.connection.start(
                m.Read, ([key],), place=lambda reply, size, buffer=buffer: [memoryview(buffer)]
            )
            hurried = rng.random() < 0.05
            outcome = pair.connection.wait(call, in_s(rng.random() * 1e-4 if hurried else SOON_S))
            if isinstance(outcome, m.ReadReply):
                if buffer != key * (size // 32):
                    wrong.append(key)
            elif not (hurried and outcome is Status.TIMED_OUT) and not pair.connection.broken:
                wrong.append(outcome)
            if rng.random() < 0.2:
                pair.connection.forget(m.Release, (1,))

    # One more caller without pause, so that the answer held back by the peer always gets pushed out.
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pair.connection.ask(m.Exists, ([KEY],), in_s(0.2))
    for thread in threads:
        thread.join(SOON_S)
    assert wrong == []
    pair.close()
    echo.join(SOON_S)


def test_a_store_that_refuses_is_told_from_one_that_fails():
    for reply, error in [
        (m.ErrorReply(1, m.ErrorCode.BAD_TOKEN, "wrong token"), RequestRefused),
        (m.HelloReply(1, 99, "", [], 1, 1, 1, 1), StoreUnavailable),
    ]:
        ours, theirs = socket.socketpair()
        connection = Connection(ours, lambda error: None)
        peer = Peer(theirs)
        greeter = threading.Thread(target=peer.greet, args=(reply,))
        greeter.start()
        with pytest.raises(error):
            connection.greet((m.PROTOCOL_VERSION, "test", ["tcp"]), in_s(SOON_S))
        greeter.join()
        theirs.close()


def test_a_forked_child_lets_go_without_hurting_the_parent(pair):
    pair.connection.abandon_after_fork()  # what the child does with its copy of the descriptor
    assert pair.connection.ask(m.Stats, (), in_s(1)) is Status.UNAVAILABLE
    assert pair.broken == []
