"""The fake and the real store give the same answers to the same calls, whatever these are.

The fake is the naive model: if they agree, tests of plugins over the fake speak for the real store.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvcore.client.fake import FakeStore, FakeStoreClient
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.integration.store_process import PATIENT, StoreProcess

KEYS = [bytes([number]) * 32 for number in range(4)]
NUM_LAYERS = 3
LAYER_BYTES = 4096
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
clients = st.integers(0, 1)
layers = st.integers(0, NUM_LAYERS - 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = StoreProcess(tmp_path_factory.mktemp("model"), pool="16mb").start()
    yield store
    assert store.stop() == 0


def content(key: bytes, writer: int, begin: int, end: int) -> bytes:
    rng = np.random.default_rng([key[0], writer])
    return rng.bytes(NUM_LAYERS * LAYER_BYTES)[begin * LAYER_BYTES : end * LAYER_BYTES]


def without_memory(status: Status) -> Status:
    """A store remembers an abort for two seconds, also from the run before this one: whoever then waits in
    vain may be told of it, or may not."""
    return Status.TIMED_OUT if status is Status.ABANDONED else status


class SameAnswers(RuleBasedStateMachine):
    address = ""

    @initialize()
    def open(self) -> None:
        model = FakeStore()
        self.fakes = [FakeStoreClient(model), FakeStoreClient(model)]
        self.reals = [
            StoreClient.connect(self.address, planes=("tcp",), **PATIENT),
            StoreClient.connect(self.address, planes=("shm",), **PATIENT),
        ]
        self.reals[1].plane.inline_read_bytes = self.reals[1].plane.inline_put_bytes = 0
        for key in KEYS:
            self.reals[0].remove(key, force=True)

    def teardown(self) -> None:
        for client in getattr(self, "reals", []):
            client.close()

    @rule(who=clients, keys=some_keys)
    def reserve(self, who, keys):
        size_bytes = NUM_LAYERS * LAYER_BYTES
        expected = self.fakes[who].reserve(keys, size_bytes, NUM_LAYERS)
        assert self.reals[who].reserve(keys, size_bytes, NUM_LAYERS) == expected

    @rule(who=clients, keys=some_keys, begin=layers, count=st.integers(1, NUM_LAYERS), spare=st.booleans())
    def write(self, who, keys, begin, count, spare):
        end = begin + count
        values = [content(key, who, begin, end) for key in keys]
        if spare:
            values[-1] += b"x"
        expected = self.fakes[who].write_layers(keys, begin, end, values).wait()
        assert self.reals[who].write_layers(keys, begin, end, values).wait() == expected

    @rule(
        who=clients,
        keys=some_keys,
        begin=layers,
        count=st.integers(1, NUM_LAYERS),
        wait_ms=st.sampled_from([0, 5]),
    )
    def read(self, who, keys, begin, count, wait_ms):
        end = begin + count
        found, expected = (
            [np.zeros(count * LAYER_BYTES, np.uint8) for _ in keys],
            [np.zeros(count * LAYER_BYTES, np.uint8) for _ in keys],
        )
        statuses = self.fakes[who].read_layers(keys, begin, end, expected, wait_ms=wait_ms).wait()
        answered = self.reals[who].read_layers(keys, begin, end, found, wait_ms=wait_ms).wait()
        assert list(map(without_memory, answered)) == list(map(without_memory, statuses))
        for status, ours, theirs in zip(statuses, found, expected, strict=True):
            if status is Status.OK:
                assert (ours == theirs).all()

    @rule(who=clients, keys=some_keys)
    def abort(self, who, keys):
        self.fakes[who].abort(keys)
        self.reals[who].abort(keys)
        # Abort does not wait; an answer behind it on the same connection tells that it has been heard.
        self.reals[who].stats()

    @rule(who=clients, keys=st.permutations(KEYS), include_pending=st.booleans())
    def lookup(self, who, keys, include_pending):
        expected = self.fakes[who].lookup(keys, include_pending=include_pending)
        found = self.reals[who].lookup(keys, include_pending=include_pending)
        assert (found.num_hits, list(found.layers_ready)) == (expected.num_hits, list(expected.layers_ready))

    @rule(keys=some_keys)
    def lose(self, keys):
        sealed = [key for key in keys if self.fakes[0].lookup([key]).num_hits]
        self.fakes[0].store.lose(sealed)
        for key in sealed:
            assert self.reals[0].remove(key, force=True) == Status.OK


def test_the_fake_and_the_real_store_agree(store):
    machine = type("SameAnswersOfThisStore", (SameAnswers,), {"address": store.address})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
