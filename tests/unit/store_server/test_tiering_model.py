"""Both tiers against a set: whatever is evicted, written back, lost by the disk or promoted, in any order, an
object is there until it is removed or the disk says that it cannot keep it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcore.wire.messages import Acquire, Exists, Pin, PinKind, Put, Read, Release, Reserve, Status, Unpin
from store_server.core.eviction import POLICIES
from store_server.core.reads import Served
from tests.unit.store_server.fake_cold import FakeCold, new_tiered_store
from tests.unit.store_server.model import KIB, abort, check_invariants, commit, key, remove

KEYS = st.integers(0, 20).map(key)
COUNTS = st.integers(1, 5)


class TieredStore(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(sorted(POLICIES)), queue_objects=st.integers(1, 6))
    def begin(self, policy: str, queue_objects: int) -> None:
        self.cold = FakeCold(queue_objects)
        self.store = new_tiered_store(self.cold, 256 * KIB, 32 * KIB, eviction_policy=policy)  # type: ignore[arg-type]
        self.session = self.store.open_session()
        self.there: set[bytes] = set()
        self.leases: list[int] = []
        self.now = 0.0

    @rule(name=KEYS, size=st.sampled_from([3 * KIB, 16 * KIB, 40 * KIB]))
    def put(self, name: bytes, size: int) -> None:
        incoming = self.store.writes.put_begin(self.session, Put(1, [name], [size]), self.now, may_wait=True)
        if incoming is None:
            assert self.cold.writing, "nobody would ever wake this writer"
            return
        (code,) = self.store.writes.received(self.session, incoming, (), self.now).statuses
        assert (code == Status.EXISTS) == (name in self.there) or code == Status.FULL
        if code == Status.OK:
            self.there.add(name)

    @rule(name=KEYS, seals=st.booleans())
    def reserve(self, name: bytes, seals: bool) -> None:
        request = Reserve(1, [name], [8 * KIB], 2)
        reply = self.store.writes.reserve(self.session, request, self.now, may_wait=True)
        if reply is not None and reply.grants[0].status == Status.OK:
            if seals:
                assert commit(self.store, self.session, [name], 0, 2) == [Status.OK]
                self.there.add(name)
            else:
                abort(self.store, self.session, [name])

    @rule(names=st.lists(KEYS, min_size=1, max_size=4, unique=True))
    def read(self, names: list[bytes]) -> None:
        served = self.store.reads.read(self.session, Read(1, names), self.now)
        if served is not None:
            self.check_served(names, served)

    @rule(name=KEYS)
    def acquire(self, name: bytes) -> None:
        reply = self.store.reads.acquire(self.session, Acquire(1, [name], 1000), self.now)
        if reply is not None and reply.lease:
            self.leases.append(reply.lease)

    @rule()
    def release(self) -> None:
        if self.leases:
            self.store.reads.release(self.session, Release(1, self.leases.pop()))

    @rule(name=KEYS, force=st.booleans())
    def remove(self, name: bytes, force: bool) -> None:
        (status,) = remove(self.store, [name], force=force)
        assert (status is Status.MISSING) == (name not in self.there)
        if status is Status.OK:
            self.there.discard(name)

    @rule(name=KEYS, kind=st.sampled_from([0, 1, 2]))
    def pin(self, name: bytes, kind: int) -> None:
        if kind:
            self.store.upkeep.pin(Pin(1, [name], PinKind(kind), ttl_ms=5000), self.now)
        else:
            self.store.upkeep.unpin(Unpin(1, [name]))

    @rule(count=COUNTS)
    def disk_writes(self, count: int) -> None:
        self.cold.finish_writes(self.store, count)

    @rule(count=COUNTS)
    def disk_refuses_late(self, count: int) -> None:
        lost = {obj.key for obj in self.cold.writing[:count]}
        self.cold.finish_writes(self.store, count, Status.FULL)
        self.there -= {name for name in lost if not self.exists(name)}

    @rule(count=COUNTS)
    def disk_reads(self, count: int) -> None:
        self.cold.finish_loads(self.store, count)

    @rule(count=COUNTS)
    def disk_reads_garbage(self, count: int) -> None:
        self.there -= {obj.key for obj in self.cold.loading[:count]}
        self.cold.finish_loads(self.store, count, Status.CORRUPT)

    @rule(count=COUNTS)
    def disk_reclaims(self, count: int) -> None:
        names = list(self.cold.stored)[:count]
        self.cold.lose(self.store, names)
        self.there -= {name for name in names if not self.exists(name)}

    @rule(size=st.sampled_from([16 * KIB, 256 * KIB]))
    def evict(self, size: int) -> None:
        self.store.space.evict_some(10, size)

    @rule()
    def clean_ahead(self) -> None:
        self.store.space.evict_some(10)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)

    def exists(self, name: bytes) -> bool:
        return self.store.reads.exists(Exists(1, [name])).statuses == bytes([Status.OK])

    def check_served(self, names: list[bytes], served: Served) -> None:
        for name, code in zip(names, served.reply.statuses, strict=True):
            assert code != Status.OK or name in self.there
        self.store.space.release(served.objects)

    @invariant()
    def answered(self) -> None:
        if hasattr(self, "store"):
            finished, self.store.waiters.finished = self.store.waiters.finished, []
            for ticket in finished:
                reply = self.store.reads.finish(ticket, self.now)
                if isinstance(reply, Served):
                    self.check_served(ticket.request.keys, reply)

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "store"):
            check_invariants(self.store)
            assert {key(number) for number in range(21) if self.exists(key(number))} == self.there

    def teardown(self) -> None:
        if hasattr(self, "store"):
            while self.cold.writing or self.cold.loading:
                self.cold.finish_writes(self.store)
                self.cold.finish_loads(self.store)
            self.store.close_session(self.session)
            check_invariants(self.store)


TieredStore.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTieredStore = pytest.mark.slow(TieredStore.TestCase)
