"""Weights replaced while an engine runs: no page goes by the name of weights that did not make it."""

import logging

import pytest

from kvcore.client.fake import FakeStore
from kvcore.errors import ConfigError
from sglang_hicache_backend.keys import EngineFacts
from sglang_hicache_backend.served_weights import ServedWeights
from tests.unit.sglang_hicache_backend.rig import Engine, MhaPool, engine_facts, page_hashes

HASHES = page_hashes(2)


class UpdatedEngine(Engine):
    """Its weights are named by the path that they were loaded from."""

    def __init__(self, store: FakeStore, served: ServedWeights) -> None:
        self._served = served
        self.num_identified = 0
        super().__init__(
            store, MhaPool(fill=1), identify=self._identify, weights_version=lambda: served.now.version
        )

    def _identify(self, config: object) -> EngineFacts:
        self.num_identified += 1
        if not self._served.now.is_known:
            raise ConfigError("these weights have no name")
        return engine_facts(weights_id=self._served.now.model_path or "first")

    def save(self) -> list[bool]:
        return self.backend.save("kv", HASHES, self.pool.slots(0, 1))

    def found(self) -> int:
        return self.backend.num_leading(HASHES)


def replace(served: ServedWeights, model_path: str) -> None:
    served.replacing()
    served.loaded(model_path, None)
    served.flushed()


def test_a_flush_gives_no_name_to_weights_that_have_none() -> None:
    served = ServedWeights()
    served.flushed()
    assert served.now.version == 0
    served.loaded("second", None)
    served.replacing()
    served.flushed()
    assert not served.now.is_known


def test_pages_go_by_the_weights_of_the_moment() -> None:
    store, served = FakeStore(), ServedWeights()
    engine = UpdatedEngine(store, served)
    assert engine.save() == [True, True] and engine.found() == 2
    replace(served, "second")
    assert engine.found() == 0
    assert engine.save() == [True, True] and engine.found() == 2
    assert len(store.objects) == 4
    replace(served, "first")
    assert engine.found() == 2, "the pages of the first weights are there again"
    # Once a change, not once a question.
    assert engine.num_identified == 3


def test_weights_without_a_name_store_and_find_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store, served = FakeStore(), ServedWeights()
    engine = UpdatedEngine(store, served)
    engine.save()
    served.replacing()
    with caplog.at_level(logging.WARNING):
        assert engine.found() == 0
        assert engine.save() == [False, False]
        assert engine.backend.load("kv", HASHES, engine.pool.slots(0, 1)) == [False, False]
    assert caplog.text.count("these weights have no name") == 1
    assert len(store.objects) == 2
    assert engine.backend.errors_total == 0
    served.loaded("first", None)
    assert engine.found() == 0, "the engine may still hold KV of other weights"
    served.flushed()
    assert engine.found() == 2


def test_a_pool_that_comes_late_has_no_name_either() -> None:
    store, served = FakeStore(), ServedWeights()
    engine = UpdatedEngine(store, served)
    served.replacing()
    assert engine.found() == 0
    late = MhaPool(fill=2)
    engine.backend.add_pool(late, "draft", late.slots(0))
    assert engine.backend.save("draft", HASHES, late.slots(0, 1)) == [False, False]
    served.loaded("second", None)
    served.flushed()
    assert engine.backend.save("draft", HASHES, late.slots(0, 1)) == [True, True]
