"""A router's index that follows a real store by its events, as it follows engines."""

import hashlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from kvcore.keys import block_keys
from kvcore.wire.events import (
    BlockStored,
    Medium,
    decode_batch,
    parse_published,
    parse_replayed,
    replay_request,
)
from kvcore.wire.messages import Remove, Status
from router.core.block_hash import block_hashes
from router.core.event_feed import EventFeed, ReplayFrom
from router.core.prefix_index import PrefixIndex
from tests.integration.store_harness import DEADLINE_S, RawClient, StartStore, StoreProcess, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import levels

BLOCK = 16
NAMESPACE = bytes(range(16))
NUM_BLOCKS = 40
PROMPT = list(range(NUM_BLOCKS * BLOCK))
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(NUM_BLOCKS)]
KEYS = block_keys(NAMESPACE, DIGESTS)
VLLM_NAMES = [int.from_bytes(digest[-8:], "big") for digest in DIGESTS]
EVENTS = ("--events.endpoint", "tcp://127.0.0.1:*", "--events.replay-endpoint", "tcp://127.0.0.1:*")


class Follower:
    """One engine's events have told the index the prompt; the store's events say what the store holds."""

    def __init__(self, store: StoreProcess, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.index = PrefixIndex(BLOCK)
        engine = self.index.add_worker("engine")
        self.index.apply(engine, [BlockStored(VLLM_NAMES, None, PROMPT, BLOCK)])
        self.index.remove_worker(self.index.add_worker("nobody"))
        self.worker = self.index.add_worker("store", shared=True)
        self.feed = EventFeed(self.index, self.worker)
        self._sub: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._sub.subscribe(b"")
        self._dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for socket, name in ((self._sub, "events_endpoint"), (self._dealer, "events_replay_endpoint")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(store.ready[name])
        self.replay(self.feed.connected())

    def replay(self, wanted: ReplayFrom | None) -> None:
        while wanted is not None:
            self._dealer.send_multipart(replay_request(wanted.first_seq))
            while True:
                assert self._dealer.poll(int(DEADLINE_S * 1000)), "the replay ends with a mark"
                answer = parse_replayed(self._dealer.recv_multipart())
                if answer.seq is None:
                    break
                self.feed.on_replayed(wanted.generation, answer.seq, answer.payload)
            wanted = self.feed.on_replay_end(wanted.generation)

    def follow(self) -> None:
        while self._sub.poll(0):
            published = parse_published(self._sub.recv_multipart())
            assert published.seq is not None
            self.replay(self.feed.on_published(published.seq, published.payload))

    def blocks(self, medium: Medium) -> int:
        """How long a prefix of the prompt the store holds there."""
        self.follow()
        slot = self.index._slots[self.worker * 5 + 1 + medium]
        own = block_hashes(PROMPT, BLOCK)
        held = [bool(slot and self.index.table.holders(one) & slot) for one in own]
        return held.index(False) if False in held else len(held)

    def close(self) -> None:
        self._sub.close()
        self._dealer.close()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_an_index_follows_what_comes_and_goes(
    start_store: StartStore, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    store = start_store(*EVENTS, "--events.topic", "kv@store")
    client = store.connect()
    client.put(KEYS[:10], [b"x" * 1000] * 10)
    follower = Follower(store, context)
    eventually(lambda: follower.blocks(Medium.CPU) == 10)
    client.put(KEYS[10:], [b"y" * 1000] * 30)
    eventually(lambda: follower.blocks(Medium.CPU) == 40)
    assert client.statuses(Remove, [KEYS[25]]) == [Status.OK]
    eventually(lambda: follower.blocks(Medium.CPU) == 25)
    assert follower.feed.stats.losses == follower.index.stats.unknown_hash == 0
    assert follower.index.match(block_hashes(PROMPT, BLOCK), 0.0).best_worker == follower.worker
    follower.close()
    stats = store.stats()
    assert stats["events_total"] >= 3 and stats["event_replays_total"] >= 1
    assert store.stop() == 0


def test_the_history_of_a_long_life_is_told_as_what_is_left_of_it(
    start_store: StartStore, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    store = start_store(*EVENTS, "--events.buffer-steps", "2")
    client = store.connect()
    for number in range(20):
        client.put([KEYS[number]], [b"x" * 1000])
        eventually(lambda seen=number: store.stats()["events_total"] > seen)
    client.statuses(Remove, KEYS[15:])
    late = Follower(store, context)
    eventually(lambda: late.blocks(Medium.CPU) == 15)
    assert store.stats()["event_snapshots_total"] == 1
    client.put(KEYS[15:20], [b"x" * 1000] * 5)
    eventually(lambda: late.blocks(Medium.CPU) == 20)
    late.close()


def test_ssd_is_told_apart_and_survives_a_restart(
    start_store: StartStore, short_dir: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    flags = (*levels(short_dir / "ssd"), *EVENTS)
    store = start_store(*flags, pool_size="16mb")
    client = store.connect()
    for first in range(0, NUM_BLOCKS, 4):  # 20 MiB
        client.put(KEYS[first : first + 4], [bytes(512 << 10)] * 4)
    follower = Follower(store, context)
    eventually(lambda: follower.blocks(Medium.DISK) >= 8)
    eventually(lambda: follower.blocks(Medium.CPU) == 0)  # the first blocks have gone to disk
    follower.close()
    assert store.stop() == 0

    again = start_store(*flags, pool_size="16mb")
    late = Follower(again, context)
    eventually(lambda: late.blocks(Medium.DISK) == NUM_BLOCKS)
    client = again.connect()
    client.read(KEYS[:2])
    eventually(lambda: late.blocks(Medium.CPU) == 2)
    client.statuses(Remove, KEYS[:1])
    eventually(lambda: late.blocks(Medium.DISK) == 0 and late.blocks(Medium.CPU) == 0)
    late.close()


def test_both_families_of_engines_find_their_names(
    start_store: StartStore, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    store = start_store(*EVENTS, "--events.hash-forms", "vllm,sglang")
    store.connect().put([KEYS[0]], [b"x" * 1000])
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.connect(store.ready["events_replay_endpoint"])
    eventually(lambda: store.stats()["events_total"] == 1)
    dealer.send_multipart([b"", b"not a number"])  # ignored
    dealer.send_multipart(replay_request(0))
    assert dealer.poll(int(DEADLINE_S * 1000))
    answer = parse_replayed(dealer.recv_multipart())
    (event,) = decode_batch(answer.payload).events
    assert isinstance(event, BlockStored)
    sglang_name = int.from_bytes(DIGESTS[0][:8], "big")
    assert list(event.block_hashes) == [VLLM_NAMES[0], sglang_name]
    dealer.close(linger=0)


@pytest.mark.slow
def test_an_endpoint_that_cannot_be_had_is_a_clear_error(start_store: StartStore) -> None:
    store = start_store(*EVENTS)
    taken = store.ready["events_endpoint"]
    with pytest.raises(AssertionError, match=f"cannot listen on {taken}"):
        start_store("--events.endpoint", taken)
    with pytest.raises(AssertionError, match="there is nothing to replay"):
        start_store("--events.replay-endpoint", "tcp://127.0.0.1:*")


def test_a_killed_store_is_noticed_when_it_comes_back(
    start_store: StartStore, short_dir: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    flags = (
        "--events.endpoint",
        f"ipc://{short_dir}/live",
        "--events.replay-endpoint",
        f"ipc://{short_dir}/replay",
    )
    store = start_store(*flags)
    client = store.connect()
    client.put(KEYS[:10], [b"x" * 1000] * 10)
    follower = Follower(store, context)
    eventually(lambda: follower.blocks(Medium.CPU) == 10)
    client.put(KEYS[10:12], [b"x" * 1000] * 2)
    eventually(lambda: follower.blocks(Medium.CPU) == 12)
    # A restart shows by numbers that go back, so the next store must not have got so far when it is heard.
    eventually(lambda: says_something(client) and follow(follower) >= 100)
    store.stop(signal.SIGKILL)

    again = start_store(*flags)  # the sockets of the killed one still lie there
    client = again.connect()
    client.put(KEYS[:3], [b"x" * 1000] * 3)

    def is_noticed() -> bool:
        says_something(client)
        time.sleep(0.1)
        return follower.blocks(Medium.CPU) == 3

    eventually(is_noticed)
    assert follower.feed.stats.restarts == 1
    follower.close()


def says_something(client: RawClient) -> bool:
    return bool(client.put([KEYS[20]], [b"x"]) and client.statuses(Remove, [KEYS[20]]))


def follow(follower: Follower) -> int:
    """Batches so far."""
    follower.follow()
    return follower.feed.stats.batches
