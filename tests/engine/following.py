"""Follows KV events of an engine or a store into an index, from the first one on."""

import zmq

from kvcore.wire.events import parse_replayed, replay_request
from router.core.event_feed import EventFeed
from router.core.prefix_index import PrefixIndex

WAIT_MS = 60_000


def follow(index: PrefixIndex, name: str, replay_endpoint: str) -> int:
    """Tells the index everything this publisher has published; its worker."""
    worker = index.add_worker(name, shared=True)
    feed = EventFeed(index, worker)
    wanted = feed.connected()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(replay_endpoint)
        dealer.send_multipart(replay_request(wanted.first_seq))
        while True:
            assert dealer.poll(WAIT_MS), f"no replay from {name}"
            answer = parse_replayed(dealer.recv_multipart())
            if answer.seq is None:
                break
            feed.on_replayed(wanted.generation, answer.seq, answer.payload)
    feed.on_replay_end(wanted.generation)
    assert feed.stats.bad_batches == feed.stats.skipped_events == 0
    return worker
