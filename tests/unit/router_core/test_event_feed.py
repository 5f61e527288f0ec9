"""Gaps, replays, restarts; and a lossy channel against the truth."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.wire.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch
from router.core.block_hash import block_hashes
from router.core.event_feed import EventFeed, ReplayFrom
from router.core.prefix_index import PrefixIndex
from router.core.view import InstanceState

BLOCK = 1


def store_event(token: int) -> BlockStored:
    return BlockStored([1000 + token], None, [token], BLOCK)


def payload(*tokens: int) -> bytes:
    return encode_batch(0.0, [store_event(token) for token in tokens])


class World:
    """An index with one worker; which of the one-block prompts 0..n does it hold?"""

    def __init__(self, max_held_batches: int = 100) -> None:
        self.index = PrefixIndex(BLOCK)
        self.worker = self.index.add_worker("a")
        self.feed = EventFeed(self.index, self.worker, max_held_batches)

    def holds(self, upto: int = 12) -> set[int]:
        instance = InstanceState("a", self.worker)
        return {
            token
            for token in range(upto)
            if self.index.match(block_hashes([token], BLOCK), 0.0).local_blocks_of((instance,)) == [1]
        }


def test_batches_in_order_are_applied_at_once() -> None:
    world = World()
    for seq in range(3):
        assert world.feed.on_published(seq, payload(seq)) is None
    assert world.holds() == {0, 1, 2}
    assert world.feed.is_current


def test_blocks_of_another_model_are_neither_stored_nor_removed() -> None:
    index = PrefixIndex(BLOCK)
    engine, store = index.add_worker("engine"), index.add_worker("store", True)
    # Both models' engines call the block of token t 1000 + t.
    index.apply(engine, [store_event(token) for token in range(4)])
    feed = EventFeed(index, store, namespaces=frozenset({"aa", "ab"}))

    def held() -> list[bool]:
        return [index.holds(store, 1000 + token) for token in range(4)]

    ours = BlockStored([1000], None, [], 0, namespace="aa"), BlockStored([1001], None, [], 0, namespace="ab")
    foreign = BlockStored([1002], None, [], 0, namespace="bb")
    unnamed = BlockStored([1003], None, [], 0)
    feed.on_published(0, encode_batch(0.0, [*ours, foreign, unnamed]))
    assert held() == [True, True, False, True]
    feed.on_published(
        1, encode_batch(0.0, [BlockRemoved([1000], namespace="bb"), BlockRemoved([1001], namespace="ab")])
    )
    assert held() == [True, False, False, True]
    feed.on_published(2, encode_batch(0.0, [AllBlocksCleared()]))
    assert held() == [False] * 4
    assert feed.stats.foreign_events == 2
    # Not told what to listen for, all of it counts.
    anything = EventFeed(index, store)
    anything.on_published(0, encode_batch(0.0, [foreign]))
    assert held() == [False, False, True, False]


def test_a_gap_is_replayed_before_what_came_after_it() -> None:
    world = World()
    world.feed.on_published(0, payload(0))
    effect = world.feed.on_published(3, encode_batch(0.0, [BlockRemoved([1001])]))
    assert isinstance(effect, ReplayFrom) and effect.first_seq == 1
    assert not world.feed.is_current
    assert world.feed.on_published(4, payload(4)) is None
    world.feed.on_replayed(effect.generation, 1, payload(1))
    world.feed.on_replayed(effect.generation, 2, payload(2))
    world.feed.on_replayed(effect.generation, 3, encode_batch(0.0, [BlockRemoved([1001])]))
    assert world.feed.on_replay_end(effect.generation) is None
    assert world.holds() == {0, 2, 4}  # 1 was stored, then removed: in that order
    assert (world.feed.stats.gaps, world.feed.stats.losses) == (1, 0)


def test_joining_late_asks_for_the_history() -> None:
    world = World()
    effect = world.feed.on_published(7, payload(7))
    assert effect is not None and effect.first_seq == 0
    assert world.holds() == set()
    for seq in range(8):
        world.feed.on_replayed(effect.generation, seq, payload(seq))
    world.feed.on_replay_end(effect.generation)
    assert world.holds() == set(range(8))


def test_a_new_connection_asks_at_once() -> None:
    world = World()
    effect = world.feed.connected()
    assert effect.first_seq == 0
    world.feed.on_replayed(effect.generation, 0, payload(0))
    world.feed.on_replay_end(effect.generation)
    assert world.holds() == {0}
    assert world.feed.on_published(1, payload(1)) is None
    assert world.holds() == {0, 1}


def test_without_a_replay_the_gap_costs_what_was_known() -> None:
    world = World()
    world.feed.on_published(0, payload(0))
    effect = world.feed.on_published(2, payload(2))
    assert effect is not None
    world.feed.on_replay_failed(effect.generation)
    assert world.holds() == {2}
    assert world.feed.stats.losses == 1
    assert world.feed.on_published(3, payload(3)) is None
    assert world.holds() == {2, 3}


def test_what_is_held_during_a_replay_is_bounded_in_bytes() -> None:
    index = PrefixIndex(BLOCK)
    feed = EventFeed(index, index.add_worker("a"), max_held_bytes=5000)
    effect = feed.on_published(1, b"x" * 4000)
    assert effect is not None and feed.stats.batches == 0
    assert feed.on_published(2, b"x" * 4000) is None
    # As when the replay failed: no more is kept, and what comes next is applied at once.
    assert feed.is_current and feed.stats.losses == 1 and feed.stats.batches == 2
    assert feed.on_published(3, b"x" * 4000) is None and feed.stats.batches == 3
    # What was given up is not counted for the next time.
    for seq in (5, 7):
        effect = feed.on_published(seq, b"x" * 4000)
        assert effect is not None and not feed.is_current
        feed.on_replay_failed(effect.generation)
        assert feed.is_current
    feed.reset()
    assert feed.on_published(1, b"x" * 4000) is not None and not feed.is_current


def test_a_replay_that_reaches_back_too_little_costs_what_was_known() -> None:
    world = World()
    world.feed.on_published(0, payload(0))
    effect = world.feed.on_published(9, payload(9))
    assert effect is not None
    world.feed.on_replayed(effect.generation, 5, payload(5))
    for seq in range(6, 10):
        world.feed.on_replayed(effect.generation, seq, payload(seq))
    world.feed.on_replay_end(effect.generation)
    assert world.holds() == {5, 6, 7, 8, 9}
    assert world.feed.stats.losses == 1


def test_an_empty_replay_does_not_go_round_for_ever() -> None:
    world = World()
    effect = world.feed.on_published(4, payload(4))
    assert effect is not None
    assert world.feed.on_replay_end(effect.generation) is None
    assert world.holds() == {4}


def test_a_gap_among_held_batches_is_replayed_too() -> None:
    world = World()
    first = world.feed.on_published(1, payload(1))
    assert first is not None
    world.feed.on_published(4, payload(4))
    world.feed.on_replayed(first.generation, 0, payload(0))
    second = world.feed.on_replay_end(first.generation)
    assert second is not None and second.first_seq == 2
    for seq in (2, 3, 4):
        world.feed.on_replayed(second.generation, seq, payload(seq))
    assert world.feed.on_replay_end(second.generation) is None
    assert world.holds() == {0, 1, 2, 3, 4}


def test_a_restart_drops_what_the_engine_held() -> None:
    world = World()
    for seq in range(4):
        world.feed.on_published(seq, payload(seq))
    assert world.feed.on_published(0, payload(8)) is None
    assert world.holds() == {8}
    assert world.feed.stats.restarts == 1
    effect = world.feed.on_published(0, payload(9))  # again, at once
    assert effect is None
    assert world.holds() == {9}


def test_a_restart_noticed_late_replays_the_new_life_only() -> None:
    world = World()
    for seq in range(6):
        world.feed.on_published(seq, payload(seq))
    effect = world.feed.on_published(2, payload(10))
    assert effect is not None and effect.first_seq == 0
    world.feed.on_replayed(effect.generation, 0, payload(8))
    world.feed.on_replayed(effect.generation, 1, payload(9))
    world.feed.on_replay_end(effect.generation)
    assert world.holds() == {8, 9, 10}


def test_answers_to_an_older_replay_are_ignored() -> None:
    world = World()
    old = world.feed.on_published(3, payload(3))
    assert old is not None
    new = world.feed.on_published(2, payload(2))  # restarted meanwhile
    assert new is not None
    world.feed.on_replayed(old.generation, 0, payload(9))
    assert world.feed.on_replay_end(old.generation) is None
    world.feed.on_replay_failed(old.generation)
    assert not world.feed.is_current
    world.feed.on_replayed(new.generation, 0, payload(0))
    world.feed.on_replayed(new.generation, 1, payload(1))
    world.feed.on_replay_end(new.generation)
    assert world.holds() == {0, 1, 2}


def test_held_batches_are_bounded() -> None:
    world = World(max_held_batches=3)
    world.feed.on_published(0, payload(0))
    for seq in range(5, 10):
        world.feed.on_published(seq, payload(seq))
    assert world.feed.is_current
    assert world.holds() == {5, 6, 7, 8, 9}


def test_reset_forgets_and_starts_again() -> None:
    world = World()
    world.feed.on_published(0, payload(0))
    world.feed.reset()
    assert world.holds() == set()
    effect = world.feed.on_published(5, payload(5))
    assert effect is not None and effect.first_seq == 0


def test_a_broken_batch_is_counted_and_passed_over() -> None:
    world = World()
    world.feed.on_published(0, b"\xc1")
    world.feed.on_published(1, payload(1))
    assert world.feed.stats.bad_batches == 1
    assert world.holds() == {1}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "restart"]), st.integers(0, 5), st.booleans()),
        max_size=40,
    ),
    st.integers(1, 50),
)
def test_after_a_loss_free_end_the_index_says_the_truth(
    steps: list[tuple[str, int, bool]], replay_buffer: int
) -> None:
    """The channel loses batches; the engine's replay buffer is short. Whatever the index claims is true, and
    when nothing was out of reach it claims everything."""
    world = World()
    published: list[bytes] = []
    truth: set[int] = set()
    lost_for_good = False
    for action, token, arrives in [*steps, ("store", 6, True)]:
        if action == "restart":
            # Noticed by the shell, as a lost connection.
            published, truth = [], set()
            world.feed.reset()
            continue
        events: Sequence[Event] = [store_event(token) if action == "store" else BlockRemoved([1000 + token])]
        truth = truth | {token} if action == "store" else truth - {token}
        published.append(encode_batch(0.0, events))
        if not arrives:
            continue
        effect = world.feed.on_published(len(published) - 1, published[-1])
        while effect is not None:
            oldest = max(0, len(published) - replay_buffer)
            lost_for_good |= oldest > effect.first_seq
            for seq in range(max(oldest, effect.first_seq), len(published)):
                world.feed.on_replayed(effect.generation, seq, published[seq])
            effect = world.feed.on_replay_end(effect.generation)
    assert world.feed.is_current
    assert world.holds() <= truth
    if not lost_for_good:
        assert world.holds() == truth
