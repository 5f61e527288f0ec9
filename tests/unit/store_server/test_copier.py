"""What goes from the SSD on to the remote: in which order, from where, and what does not go."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore import metrics
from kvcore.wire.messages import Status
from store_server.copier import Copier
from store_server.core.objects import Session, StoredObject
from store_server.core.store import Store
from store_server.core.tiering import Acceptance, ColdObject
from tests.unit.store_server.fake_cold import FakeCold, new_tiered_store
from tests.unit.store_server.model import KIB, check_invariants, key, put

SIZE = 4 * KIB


class FakeSsd:
    def __init__(self) -> None:
        self.places: dict[bytes, ColdObject] = {}
        self.reads: list[tuple[bytes, Callable[[Any], None]]] = []

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.places)

    def place(self, name: bytes) -> ColdObject | None:
        return self.places.get(name)

    def read(self, name: bytes, buffer: memoryview, on_read: Callable[[Any], None]) -> bool:
        self.reads.append((name, on_read))
        return name in self.places

    def finish_read(self, status: Status = Status.OK) -> None:
        name, on_read = self.reads.pop(0)
        on_read(SimpleNamespace(request=SimpleNamespace(key=name), status=status, checksums=[7]))


class FakeRemote:
    """`room` is how many more writes it takes."""

    def __init__(self) -> None:
        self.room = 1000
        self.is_available = True
        self.free_bytes = 1 << 40  # before anything has to leave
        self.stored: list[bytes] = []
        self.writes: list[tuple[bytes, Callable[[Any], None]]] = []

    @property
    def takes_writes(self) -> bool:
        return self.is_available and self.room > 0

    def has_copy(self, name: bytes) -> bool:
        return name in self.stored

    def has_room(self, name: bytes, size_bytes: int) -> bool:
        return self.free_bytes >= size_bytes

    def copy(self, obj: StoredObject, on_written: Callable[[Any], None]) -> Acceptance:
        return self._take(obj.key, on_written)

    def write(
        self, name: bytes, num_layers: int, views: Any, checksums: Sequence[int], token: Callable[[Any], None]
    ) -> Acceptance:
        assert list(checksums) == [7]
        return self._take(name, token)

    def _take(self, name: bytes, token: Callable[[Any], None]) -> Acceptance:
        if not self.is_available:
            return Acceptance.REFUSED
        if not self.room:
            return Acceptance.BUSY
        self.room -= 1
        self.writes.append((name, token))
        return Acceptance.QUEUED

    def finish_write(self, status: Status = Status.OK) -> None:
        name, token = self.writes.pop(0)
        self.room += 1
        if status is Status.OK:
            self.stored.append(name)
        token(SimpleNamespace(request=SimpleNamespace(key=name), status=status))


@pytest.fixture
def ssd() -> FakeSsd:
    return FakeSsd()


@pytest.fixture
def remote() -> FakeRemote:
    return FakeRemote()


@pytest.fixture
def copier(ssd: FakeSsd, remote: FakeRemote) -> Copier:
    return Copier(ssd, remote)  # type: ignore[arg-type]


@pytest.fixture
def store() -> Store:
    return new_tiered_store(FakeCold())


@pytest.fixture
def session(store: Store) -> Session:
    return store.open_session()


def comes_to_ssd(ssd: FakeSsd, copier: Copier, *numbers: int) -> None:
    for number in numbers:
        ssd.places[key(number)] = ColdObject(SIZE, 1)
        copier.add(key(number))


def names(writes: Sequence[tuple[bytes, Any]]) -> list[bytes]:
    return [name for name, _ in writes]


def test_the_oldest_goes_first_and_from_dram_if_it_is_there(
    store: Store, session: Session, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    put(store, session, [key(2)], SIZE)
    comes_to_ssd(ssd, copier, 1, 2, 3)
    copier.proceed(store)
    assert names(remote.writes) == [key(2)] and names(ssd.reads) == [key(1), key(3)]
    assert store.catalog.by_key[key(2)].users == 1
    ssd.finish_read()
    ssd.finish_read()
    while remote.writes:
        remote.finish_write()
    assert sorted(remote.stored) == [key(1), key(2), key(3)]
    assert store.catalog.by_key[key(2)].users == 0
    check_invariants(store)


def test_a_full_queue_and_a_remote_that_is_down_keep_the_order(
    store: Store, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    remote.room = 1
    comes_to_ssd(ssd, copier, 1, 2, 3)
    copier.proceed(store)
    assert names(ssd.reads) == [key(1), key(2), key(3)]  # read ahead
    for _ in range(3):
        ssd.finish_read()
    assert names(remote.writes) == [key(1)]
    assert copier.stats()[metrics.REMOTE_COPIES_PENDING] == 2
    remote.finish_write(Status.UNAVAILABLE)
    remote.is_available = False
    copier.proceed(store)
    assert not ssd.reads and copier.stats()[metrics.REMOTE_COPIES_PENDING] == 3
    remote.is_available, remote.room = True, 1000
    copier.proceed(store)
    assert names(ssd.reads)[0] == key(1) and len(ssd.reads) == 3


def test_what_is_removed_does_not_come_back(
    store: Store, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    comes_to_ssd(ssd, copier, 1, 2)
    copier.proceed(store)
    copier.forget(key(1))
    ssd.finish_read()
    ssd.finish_read()
    assert names(remote.writes) == [key(2)]
    comes_to_ssd(ssd, copier, 3)
    copier.forget(key(3))
    copier.proceed(store)
    assert not ssd.reads and copier.stats()[metrics.REMOTE_COPIES_MISSED_TOTAL] == 0


def test_what_left_the_ssd_before_its_turn_is_counted(
    store: Store, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    comes_to_ssd(ssd, copier, 1, 2)
    del ssd.places[key(1)]
    copier.proceed(store)
    ssd.finish_read(Status.CORRUPT)
    assert copier.stats()[metrics.REMOTE_COPIES_MISSED_TOTAL] == 2 and not remote.writes


def test_after_a_listing_what_is_missing_there_is_copied(
    store: Store, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    ssd.places = {key(n): ColdObject(SIZE, 1) for n in range(4)}
    remote.stored = [key(0), key(2)]
    copier.add_missing()
    copier.proceed(store)
    assert names(ssd.reads) == [key(1), key(3)]


def test_what_had_to_leave_the_remote_does_not_push_out_what_is_younger(
    store: Store, ssd: FakeSsd, remote: FakeRemote, copier: Copier
) -> None:
    ssd.places = {key(n): ColdObject(SIZE, 1) for n in range(4)}
    remote.stored = [key(2), key(3)]
    remote.free_bytes = SIZE - 1
    copier.add_missing()
    copier.proceed(store)
    assert not ssd.reads and copier.stats()[metrics.REMOTE_COPIES_PENDING] == 0
    assert copier.stats()[metrics.REMOTE_COPIES_MISSED_TOTAL] == 0
    comes_to_ssd(ssd, copier, 5)  # this one may
    copier.proceed(store)
    assert names(ssd.reads) == [key(5)]
    ssd.finish_read()
    remote.finish_write()
    remote.free_bytes = SIZE
    copier.add_missing()
    copier.proceed(store)
    assert names(ssd.reads) == [key(0)], "there is room for one"
    copier.add_missing()
    copier.proceed(store)
    assert names(ssd.reads) == [key(0)], "which is on its way"
