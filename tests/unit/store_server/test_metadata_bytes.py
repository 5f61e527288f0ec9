"""Bookkeeping is estimated, so the estimate is measured."""

import gc
import tracemalloc

import pytest

from kvcore.wire.messages import Exists, Put, Status
from store_server.core.eviction import POLICIES
from store_server.core.objects import METADATA_BYTES_PER_LAYER, METADATA_BYTES_PER_OBJECT
from tests.unit.store_server.model import check_invariants, key, new_store


def test_the_estimate_is_what_python_takes() -> None:
    num_objects = 20_000
    store = new_store(1 << 30)
    session = store.open_session()
    gc.collect()
    tracemalloc.start()
    try:
        for first in range(0, num_objects, 100):
            # As from the wire: new bytes objects, sizes that are no small integers.
            request = Put(
                1, [key(number) for number in range(first, first + 100)], [4096] * 100, [1 << 60] * 100
            )
            incoming = store.writes.put_begin(session, request, 0.0)
            store.writes.received(session, incoming, (), 0.0)
        del request, incoming
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] / num_objects
    finally:
        tracemalloc.stop()
    estimate = METADATA_BYTES_PER_OBJECT + METADATA_BYTES_PER_LAYER + POLICIES["lru"]().bytes_per_object
    assert 0.75 * estimate < measured <= 1.05 * estimate, f"{measured:.0f} bytes an object"
    assert store.catalog.metadata_bytes == num_objects * estimate


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_million_keys_in_tens_of_gigabytes_change_no_answer() -> None:
    """The core holds no bytes, so a pool of 40 GiB costs nothing here."""
    num_objects, batch = 1_000_000, 500
    store = new_store(40 << 30)
    session = store.open_session()
    for first in range(0, num_objects, batch):
        request = Put(1, [key(number) for number in range(first, first + batch)], [16 << 10] * batch)
        incoming = store.writes.put_begin(session, request, 0.0)
        assert not any(store.writes.received(session, incoming, (), 0.0).statuses)
    known = store.catalog.by_key
    assert len(known) == num_objects
    probes = [key(number) for number in range(0, num_objects + 1000, 997)]
    statuses = store.reads.exists(Exists(1, probes)).statuses
    expected = [
        Status.OK if int.from_bytes(probe, "big") < num_objects else Status.MISSING for probe in probes
    ]
    assert list(statuses) == expected
    # Half a million of another size: more than fits, so the oldest go and the newest are all there.
    end = num_objects + 500_000
    for first in range(num_objects, end, batch):
        request = Put(1, [key(number) for number in range(first, first + batch)], [64 << 10] * batch)
        incoming = store.writes.put_begin(session, request, 0.0)
        assert not any(store.writes.received(session, incoming, (), 0.0).statuses)
    assert key(0) not in known and key(num_objects - 1) in known
    assert all(key(number) in known for number in range(num_objects, end, 101))
    assert store.space.committed_bytes <= store.space.capacity_bytes
    check_invariants(store)
