"""The store against a dict: whatever happens, what it says is what a dict of objects would say, no byte has
two owners and nothing is leaked. (What eviction may take away the model learns from the store.)"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvcore import metrics
from kvcore.wire.messages import Exists, PinKind, Status, Write
from store_server.core.objects import Session
from store_server.core.writes import Incoming
from tests.unit.store_server.model import (
    KIB,
    abort,
    acquire,
    check_invariants,
    commit,
    key,
    new_store,
    put,
    read,
    remove,
    reserve,
)

KEYS = st.integers(0, 15).map(key)
KEY_LISTS = st.lists(KEYS, min_size=1, max_size=4, unique=True)


class NaiveObject:
    def __init__(self, num_layers: int, owner: Session | None) -> None:
        self.num_layers = num_layers
        self.layers_ready = 0
        self.owner = owner
        self.is_pinned_hard = False


class StoreMachine(RuleBasedStateMachine):
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.store = new_store(512 * KIB, slab_bytes=32 * KIB)
        self.now = 0.0
        self.model: dict[bytes, NaiveObject] = {}
        self.open: list[Session] = []
        self.closed: list[Session] = []
        self.incoming: list[tuple[Session, Incoming]] = []

    @initialize(target=sessions)
    def first_session(self) -> Session:
        return self.open_session(is_mapped=False)

    @rule(target=sessions, is_mapped=st.booleans())
    def open_session(self, is_mapped: bool) -> Session:
        session = self.store.open_session()
        session.is_mapped = is_mapped
        self.open.append(session)
        return session

    def forget_evicted(self) -> None:
        for gone in [name for name in self.model if name not in self.store.catalog.by_key]:
            obj = self.model.pop(gone)
            assert obj.layers_ready == obj.num_layers, "only sealed objects may be evicted"
            assert not obj.is_pinned_hard

    def expected(self, name: bytes) -> Status:
        obj = self.model.get(name)
        if obj is None:
            return Status.OK
        return Status.EXISTS if obj.layers_ready == obj.num_layers else Status.PENDING

    @rule(session=sessions, keys=KEY_LISTS, size=st.sampled_from([100, 4 * KIB, 20 * KIB, 50 * KIB]))
    def put(self, session: Session, keys: list[bytes], size: int) -> None:
        for name in keys:
            (status,) = put(self.store, session, [name], size, self.now)
            self.forget_evicted()
            assert status in (self.expected(name), Status.FULL)
            if status is Status.OK:
                self.model[name] = NaiveObject(1, None)
                self.model[name].layers_ready = 1

    @rule(session=sessions, name=KEYS, num_layers=st.integers(2, 6))
    def reserve(self, session: Session, name: bytes, num_layers: int) -> None:
        (status,) = reserve(self.store, session, [name], 6 * KIB * num_layers, num_layers, self.now)
        self.forget_evicted()
        assert status in (self.expected(name), Status.FULL)
        if status is Status.OK:
            self.model[name] = NaiveObject(num_layers, session)

    @rule(session=sessions, name=KEYS, begin=st.integers(0, 4), count=st.integers(1, 2))
    def commit_anything(self, session: Session, name: bytes, begin: int, count: int) -> None:
        self.commit(session, name, begin, begin + count)

    @rule(choice=st.integers(0, 7), gap=st.sampled_from([0, 0, 0, 1, -1]), count=st.integers(1, 3))
    def commit_what_is_reserved(self, choice: int, gap: int, count: int) -> None:
        reserved = [name for name, obj in sorted(self.model.items()) if obj.owner is not None]
        if reserved:
            name = reserved[choice % len(reserved)]
            begin = max(self.model[name].layers_ready + gap, 0)
            self.commit(self.model[name].owner, name, begin, begin + count)

    def commit(self, session: Session | None, name: bytes, begin: int, end: int) -> None:
        assert session is not None
        (status,) = commit(self.store, session, [name], begin, end, self.now)
        obj = self.model.get(name)
        if obj is None:
            assert status is Status.ABANDONED
        elif obj.owner is not session or obj.layers_ready != begin or end > obj.num_layers:
            assert status is Status.INVALID
        else:
            assert status is Status.OK
            obj.layers_ready = end
            if obj.layers_ready == obj.num_layers:
                obj.owner = None

    @rule(session=sessions, name=KEYS)
    def begin_write(self, session: Session, name: bytes) -> None:
        obj = self.model.get(name)
        if obj is not None and obj.owner is session:
            request = Write(1, [name], obj.layers_ready, obj.layers_ready + 1)
            self.incoming.append((session, self.store.writes.write_begin(session, request, 6 * KIB)))

    @rule()
    def break_off_a_write(self) -> None:
        if self.incoming:
            session, incoming = self.incoming.pop()
            self.store.writes.interrupted(session, incoming)

    @rule(session=sessions, name=KEYS)
    def abort(self, session: Session, name: bytes) -> None:
        (status,) = abort(self.store, session, [name])
        obj = self.model.get(name)
        if obj is not None and obj.owner is session:
            del self.model[name]
            assert status is Status.OK
        else:
            assert status is (Status.OK if obj is None else Status.INVALID)

    @rule(session=sessions, keys=KEY_LISTS, begin=st.integers(0, 1), count=st.integers(1, 3))
    def read(self, session: Session, keys: list[bytes], begin: int, count: int) -> None:
        for name, status in zip(keys, read(self.store, session, keys, begin, begin + count), strict=True):
            obj = self.model.get(name)
            if obj is None:
                assert status is Status.MISSING
            elif begin + count > obj.num_layers:
                assert status is Status.INVALID
            else:
                assert status is (Status.OK if obj.layers_ready >= begin + count else Status.PENDING)

    @rule(session=sessions, keys=KEY_LISTS)
    def acquire(self, session: Session, keys: list[bytes]) -> None:
        acquire(self.store, session, keys, self.now)

    @rule(name=KEYS, kind=st.sampled_from([0, 1, 2]))
    def pin(self, name: bytes, kind: int) -> None:
        obj = self.store.catalog.by_key.get(name)
        if obj is not None:
            self.model[name].is_pinned_hard = kind == PinKind.HARD
        if obj is not None and kind:
            self.store.space.pin(obj, PinKind(kind), self.now + 2)
        elif obj is not None:
            self.store.space.unpin(obj)

    @rule(name=KEYS, force=st.booleans())
    def remove(self, name: bytes, force: bool) -> None:
        (status,) = remove(self.store, [name], force=force)
        if name not in self.model:
            assert status is Status.MISSING
        elif status is Status.OK:
            del self.model[name]
        else:
            assert not force and status in (Status.LEASED, Status.PENDING)

    @rule()
    def evict(self) -> None:
        self.store.space.evict_some(3, free_bytes=256 * KIB)
        self.forget_evicted()

    @rule(seconds=st.sampled_from([0.3, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)
        assert self.store.agenda.earliest > self.now
        for name in [name for name in self.model if name not in self.store.catalog.by_key]:
            assert self.model[name].owner is not None, "only a reservation ends by time"
            del self.model[name]

    @rule(session=consumes(sessions))
    def close_session(self, session: Session) -> None:
        self.open.remove(session)
        self.closed.append(session)
        self.store.close_session(session)
        self.model = {name: obj for name, obj in self.model.items() if obj.owner is not session}

    @rule()
    def mapping_of_a_closed_session_ends(self) -> None:
        if self.closed:
            self.unmap(self.closed.pop())

    @rule(session=sessions)
    def mapping_ends(self, session: Session) -> None:
        self.unmap(session)

    def unmap(self, session: Session) -> None:
        session.is_mapped = False
        self.store.writes.access_ended(session)

    @invariant()
    def it_is_the_dict(self) -> None:
        statuses = self.store.reads.exists(Exists(1, [key(number) for number in range(16)])).statuses
        for number, code in enumerate(statuses):
            obj = self.model.get(key(number))
            if obj is None:
                assert code == Status.MISSING
            else:
                assert code == (Status.OK if obj.layers_ready == obj.num_layers else Status.PENDING)
        check_invariants(self.store)

    def teardown(self) -> None:
        for session, incoming in self.incoming:
            self.store.writes.interrupted(session, incoming)
        for session in self.open:
            self.store.close_session(session)
        for session in self.open + self.closed:
            self.unmap(session)
        for name in list(self.store.catalog.by_key):
            assert remove(self.store, [name], force=True) == [Status.OK]
        assert self.store.space.allocator.requested_bytes == 0
        assert self.store.stats()[metrics.QUARANTINED_BYTES] == 0
        assert self.store.stats()[metrics.LEASES] == self.store.stats()[metrics.OBJECTS] == 0
        assert self.store.catalog.metadata_bytes == 0


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestStoreAgainstADict = StoreMachine.TestCase


@pytest.mark.slow
def test_the_same_for_long_histories() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=300, stateful_step_count=120, deadline=None)
    )
