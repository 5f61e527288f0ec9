"""An engine's KV event publisher: PUB and ROUTER sockets, a replay buffer, and faults on demand."""

import threading
from collections.abc import Sequence

import zmq

from kvcore.wire.events import (
    BlockStored,
    Event,
    encode_batch,
    parse_replay_request,
    published_frames,
    replay_end_frames,
    replayed_frames,
)


class EventPublisher:
    """Publishes when told; answers replays from a thread of its own until `close`."""

    def __init__(self, *, connects_to: str = "", port: int = 0, replay_port: int = 0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # As PUB, but subscriptions can be seen: what is published before one arrives is lost.
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        if connects_to:
            self._pub.connect(connects_to)
        else:
            self._pub.bind(f"tcp://127.0.0.1:{port or '*'}")
        self._router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.buffer: list[bytes] = []
        self.num_replays = 0
        self._heard = False
        self._closing = False
        self._thread = threading.Thread(target=self._answer_replays, daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[Event], *, lost: bool = False) -> None:
        """`lost`: it stays in the buffer but does not arrive."""
        payload = encode_batch(0.0, events)
        self.buffer.append(payload)
        if not lost:
            self._pub.send_multipart(published_frames("kv", len(self.buffer) - 1, payload))

    def is_heard(self) -> bool:
        while self._pub.poll(0):
            self._heard = self._pub.recv() == b"\x01"
        return self._heard

    def raw(self, frames: list[bytes]) -> None:
        self._pub.send_multipart(frames)

    def _answer_replays(self) -> None:
        while not self._closing:
            if not self._router.poll(20):
                continue
            peer, first = parse_replay_request(self._router.recv_multipart())
            for seq, payload in list(enumerate(self.buffer))[first:]:
                self._router.send_multipart(replayed_frames(peer, "kv", seq, payload))
            self._router.send_multipart(replay_end_frames(peer))
            self.num_replays += 1

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._pub.close()
        self._router.close()
        self._context.term()


def stored(hashes: Sequence[int], tokens: Sequence[int], parent: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), parent, list(tokens), 16)
