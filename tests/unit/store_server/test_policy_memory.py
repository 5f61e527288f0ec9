"""What policies say they take of memory, held against what Python takes."""

import gc
import tracemalloc

import pytest

from store_server.core.eviction import POLICIES
from tests.contracts.eviction_contract import Entry, evict

NUM_OBJECTS = 30_000
CHAIN = 50


@pytest.mark.slow
@pytest.mark.parametrize("name", list(POLICIES))
def test_the_estimate_is_near_enough(name: str) -> None:
    """A full cache of prefixes, half of them seen again, through which as many new ones have passed."""
    entries = [Entry(number.to_bytes(32, "big")) for number in range(2 * NUM_OBJECTS)]
    gc.collect()
    tracemalloc.start()
    try:
        policy = POLICIES[name]()
        for first in range(0, 2 * NUM_OBJECTS, CHAIN):
            while len(policy) > NUM_OBJECTS - CHAIN:
                evict(policy)
            for index in range(first + CHAIN - 1, first - 1, -1):
                policy.on_insert(entries[index], entries[index - 1].key if index > first else None)
            policy.on_access([entry.key for entry in entries[max(first - 4 * CHAIN, 0) : first : 2]])
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] / NUM_OBJECTS
    finally:
        tracemalloc.stop()
    # Dicts grow by doubling, so the truth moves by a factor of two with the number of objects.
    assert 0.7 * policy.bytes_per_object < measured < 1.4 * policy.bytes_per_object, f"{measured:.0f} bytes"
