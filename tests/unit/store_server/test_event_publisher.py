"""The event publisher with subscribers that are slow, gone, or ask for odd things."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop
import zmq

from kvcore.errors import ConfigError
from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, parse_replayed
from kvcore.wire.events import replay_request as ask_from
from kvcore.wire.messages import Tier
from store_server.core.placements import PlacementLog
from store_server.events import EventPublisher
from store_server.events_config import EventsConfig

ANYWHERE = "tcp://127.0.0.1:*"
WAIT_MS = 60_000


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


async def receive(socket: Any) -> list[bytes]:
    """In a thread, so that a test waits for the socket and for nothing else."""
    frames: list[bytes] = await asyncio.to_thread(socket.recv_multipart)
    return frames


class World:
    """A publisher, what it publishes about, and sockets of subscribers. Everything in one loop."""

    def __init__(self, **settings: Any) -> None:
        self.held: dict[Tier, list[bytes]] = {Tier.DRAM: []}
        self.log = PlacementLog()
        config = EventsConfig(endpoint=ANYWHERE, replay_endpoint=ANYWHERE, **settings)
        self.publisher = EventPublisher(config, self.log, lambda: self.held.items())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def store(self, *numbers: int) -> None:
        """One batch."""
        keys = [key(number) for number in numbers]
        self.held[Tier.DRAM] += keys
        self.log.stored(keys, Tier.DRAM)
        self.publisher.flush()

    def dealer(self) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 10)
        # Less than a segment of the loopback would leave it to TCP's window probes, up to minutes apart.
        socket.setsockopt(zmq.RCVBUF, 128 << 10)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(self.publisher.endpoints[1])
        return socket

    async def replay(self, first_seq: int) -> list[tuple[int, bytes]]:
        dealer = self.dealer()
        dealer.send_multipart(ask_from(first_seq))
        answers = []
        while True:
            answer = parse_replayed(await receive(dealer))
            if answer.seq is None:
                dealer.close(linger=0)
                return answers
            answers.append((answer.seq, answer.payload))


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield request.param


def test_events_say_whose_blocks_they_are(run: Any) -> None:
    async def check() -> None:
        world = World()
        world.publisher.start()
        try:
            keys = [namespace * 16 + bytes([number]) * 16 for namespace in (b"a", b"b") for number in (1, 2)]
            world.log.stored([b"short", *keys], Tier.DRAM)
            world.log.removed(keys[2:], Tier.DRAM)
            world.publisher.flush()
            ((_, payload),) = await world.replay(0)
            events = [one for one in decode_batch(payload).events if not isinstance(one, AllBlocksCleared)]
            assert [type(one) for one in events] == [BlockStored, BlockStored, BlockRemoved]
            assert [one.namespace for one in events] == [
                (b"a" * 16).hex(),
                (b"b" * 16).hex(),
                (b"b" * 16).hex(),
            ]
            # Names alone would not tell them apart.
            assert events[0].block_hashes == events[1].block_hashes == events[2].block_hashes
        finally:
            await world.publisher.stop()
            world.context.destroy(linger=0)

    run(check())


def in_world(run: Any, story: Any, **settings: Any) -> None:
    async def tell() -> None:
        world = World(**settings)
        world.publisher.start()
        try:
            await story(world)
        finally:
            world.context.destroy(linger=0)
            await world.publisher.stop()

    body: Coroutine[Any, Any, None] = tell()
    run(body)


def test_a_replay_is_the_history_from_where_it_was_asked(run: Any) -> None:
    async def story(world: World) -> None:
        for number in range(5):
            world.store(number)
        assert [seq for seq, _ in await world.replay(0)] == [0, 1, 2, 3, 4]
        assert [seq for seq, _ in await world.replay(3)] == [3, 4]
        assert await world.replay(5) == await world.replay(10**9) == []

    in_world(run, story)


@pytest.mark.parametrize("first_seq", [0, 7, 8])
def test_what_is_no_longer_known_is_told_as_what_there_is_now(run: Any, first_seq: int) -> None:
    async def story(world: World) -> None:
        world.held[Tier.SSD] = [key(number) for number in range(1000, 1000 + 10_000)]
        for number in range(10):
            world.store(number)
        answers = await world.replay(first_seq)
        seqs = [seq for seq, _ in answers]
        assert seqs == list(range(seqs[0], 10)) and seqs[0] >= first_seq, "up to the newest, none twice"
        events = [event for _, payload in answers for event in decode_batch(payload).events]
        assert isinstance(events[0], AllBlocksCleared)
        told = {(event.medium.name, name) for event in events[1:] for name in event.block_hashes}  # type: ignore[union-attr]
        assert told == {("CPU", number) for number in range(10)} | {
            ("DISK", number) for number in range(1000, 11_000)
        }

    in_world(run, story, buffer_steps=1)


def test_an_empty_store_is_told_as_such(run: Any) -> None:
    async def story(world: World) -> None:
        world.store(1)
        world.held[Tier.DRAM] = []
        world.log.removed([key(1)], Tier.DRAM)
        world.publisher.flush()
        ((seq, payload),) = await world.replay(0)
        assert seq == 1 and [type(event) for event in decode_batch(payload).events] == [AllBlocksCleared]

    in_world(run, story, buffer_steps=1)


def test_a_slow_subscriber_gets_all_of_it_and_holds_up_nobody(run: Any) -> None:
    async def story(world: World) -> None:
        for number in range(3000):
            world.store(*range(number * 150, number * 150 + 150))
        slow = world.dealer()
        slow.send_multipart(ask_from(0))
        await asyncio.sleep(0.2)
        assert len(await world.replay(2990)) == 10
        count = 0
        while parse_replayed(await receive(slow)).seq is not None:
            count += 1
        assert count == 3000
        slow.close(linger=0)

    in_world(run, story)


def test_a_subscriber_may_leave_in_the_middle(run: Any) -> None:
    async def story(world: World) -> None:
        for number in range(3000):
            world.store(*range(number * 150, number * 150 + 150))
        for _ in range(3):
            leaving = world.dealer()
            leaving.send_multipart(ask_from(0))
            await receive(leaving)
            leaving.close(linger=0)
        assert len(await world.replay(0)) == 3000

    in_world(run, story)


def test_what_is_no_request_is_ignored(run: Any) -> None:
    async def story(world: World) -> None:
        world.store(1)
        dealer = world.dealer()
        for frames in ([b"hello"], [b"", b"", b"", b""], [b"", b"short"], [b"x", bytes(8)]):
            dealer.send_multipart(frames)
        assert len(await world.replay(0)) == 1
        dealer.close(linger=0)

    in_world(run, story)


def test_live_batches_come_with_topic_and_number(run: Any) -> None:
    async def story(world: World) -> None:
        subscriber = world.context.socket(zmq.SUB)
        subscriber.subscribe(b"kv@")
        subscriber.connect(world.publisher.endpoints[0])
        while not await asyncio.to_thread(subscriber.poll, 20):  # until the subscription has arrived
            world.store(1)
        topic, seq, payload = await receive(subscriber)
        assert topic == b"kv@node" and len(seq) == 8
        (event,) = decode_batch(payload).events
        assert isinstance(event, BlockStored) and list(event.block_hashes) == [1]
        world.log.removed([key(1), b"a short name"], Tier.SSD)
        world.log.stored([b"another short name"], Tier.SSD)
        world.publisher.schedule()
        while True:  # what had piled up comes first
            _, _, payload = await receive(subscriber)
            (event,) = decode_batch(payload).events
            if isinstance(event, BlockRemoved):
                break
        assert list(event.block_hashes) == [1], "only keys of blocks have names that engines know"
        subscriber.close(linger=0)

    in_world(run, story, topic="kv@node")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "events.endpoint: write"),
        ({"replay_endpoint": ANYWHERE}, "nothing to replay"),
        ({"endpoint": ANYWHERE, "buffer_steps": 0}, "at least 1"),
        ({"endpoint": ANYWHERE, "hash_forms": ()}, "at least one of vllm, sglang"),
    ],
)
def test_mistakes_are_explained(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EventsConfig(**settings).check()
