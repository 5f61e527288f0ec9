"""The index against a plain dict, listings included, and what it takes of memory."""

import tracemalloc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.wire.messages import Tier
from store_server.core.tiering import ColdObject
from store_server.remote.format import name_of
from store_server.remote.index import BYTES_PER_KEY, RemoteIndex

MAX_KEYS = 8
keys = st.integers(0, 11).map(lambda number: bytes([number]) * 4)
places = st.builds(ColdObject, st.integers(1, 9), st.integers(1, 3), st.just(Tier.REMOTE))


class IndexMachine(RuleBasedStateMachine):
    """`remote` is what really lies there; other stores change it behind our back."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RemoteIndex(MAX_KEYS)
        self.known: dict[bytes, ColdObject] = {}
        self.remote: dict[bytes, ColdObject] = {}
        self.pages: list[list[str]] | None = None
        self.listed: set[bytes] = set()
        self.touched: set[bytes] = set()

    @rule(key=keys, place=places)
    def written(self, key: bytes, place: ColdObject) -> None:
        self.remote[key] = place
        self.known.pop(key, None)
        self.touched.add(key)
        forgotten = self.index.add(key, place)
        assert len(forgotten) == max(len(self.known) + 1 - MAX_KEYS, 0)
        for old in forgotten:
            del self.known[old]
        self.known[key] = place

    @rule(key=keys)
    def removed(self, key: bytes) -> None:
        self.remote.pop(key, None)
        self.touched.add(key)
        assert self.index.remove(key) == self.known.pop(key, None)

    @rule(key=keys, place=places)
    def another_store_writes(self, key: bytes, place: ColdObject) -> None:
        self.remote.setdefault(key, place)

    @rule(key=keys)
    def a_rule_of_the_remote_deletes(self, key: bytes) -> None:
        self.remote.pop(key, None)

    @precondition(lambda self: self.pages is None)
    @rule(page_size=st.integers(1, 4))
    def a_listing_begins(self, page_size: int) -> None:
        names = [name_of(key, place.num_layers, place.size_bytes) for key, place in self.remote.items()]
        self.pages = [names[at : at + page_size] for at in range(0, len(names), page_size)]
        self.remote_then = dict(self.remote)
        self.listed = set()
        self.touched = set()
        self.known_then = set(self.known)
        self.index.listing_begins()

    @precondition(lambda self: self.pages)
    @rule()
    def a_page_comes(self) -> None:
        assert self.pages is not None
        page = self.pages.pop(0)
        found = self.index.listed([*page, "not/ours"])
        for key, place in self.remote_then.items():
            if name_of(key, place.num_layers, place.size_bytes) not in page:
                continue
            self.listed.add(key)
            if key in found:
                assert key not in self.known
                self.known[key] = place
            elif key in self.known:
                self.known[key] = place
            else:
                assert key in self.touched or len(self.known) == MAX_KEYS

    @precondition(lambda self: self.pages is not None)
    @rule()
    def it_ends(self) -> None:
        assert self.pages is not None
        is_complete = not self.pages
        self.pages = None
        gone = self.index.listing_ends(is_complete)
        assert set(gone) == (
            {key for key in self.known if key not in self.listed and key not in self.touched}
            if is_complete
            else set()
        )
        for key in gone:
            del self.known[key]

    @invariant()
    def it_knows_what_it_should(self) -> None:
        assert {key: self.index.find(key) for key in self.index} == self.known
        assert len(self.index) == len(self.known) <= MAX_KEYS
        assert self.index.size_bytes == sum(place.size_bytes for place in self.known.values())


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_is_the_oldest() -> None:
    index = RemoteIndex(100)
    for number in range(4):
        index.add(bytes([number]), ColdObject(1, 1))
    index.touch(b"\0")
    assert index.oldest() == b"\1"


def test_what_made_room_is_found_by_the_listing_under_way_when_there_is_room_again() -> None:
    index = RemoteIndex(1)
    index.add(b"a", ColdObject(1, 1))
    index.listing_begins()
    assert index.add(b"b", ColdObject(1, 1)) == [b"a"]
    index.remove(b"b")
    assert index.listed([name_of(b"b", 1, 1), name_of(b"a", 1, 1)]) == [b"a"]


def test_memory_is_near_the_estimate() -> None:
    num_keys = 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = RemoteIndex(num_keys)
        for number in range(num_keys):
            index.add(number.to_bytes(32, "big"), ColdObject(1 << 20, 32))
        per_key = (tracemalloc.get_traced_memory()[0] - before) / num_keys
    finally:
        tracemalloc.stop()
    assert 0.6 * BYTES_PER_KEY < per_key < 1.1 * BYTES_PER_KEY
