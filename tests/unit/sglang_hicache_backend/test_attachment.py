"""Whatever goes wrong, SGLang's threads get misses; and somebody is told."""

import logging
from typing import Any

import numpy as np
import pytest

from kvcore.client.fake import FakeStore
from kvcore.errors import ConfigError
from sglang_hicache_backend.attachment import Attachment
from sglang_hicache_backend.hits import Restorable
from sglang_hicache_backend.keys import RankFacts
from tests.unit.sglang_hicache_backend.rig import Engine, HostTensor, MhaPool, engine_facts, page_hashes

HASHES = page_hashes(2)


def assert_has_nothing(backend: Attachment, pool: MhaPool) -> None:
    assert backend.num_leading(HASHES) == 0
    assert backend.restorable(HASHES, [("swa", "trailing_pages", 1)]) == Restorable(0, {}, [])
    assert backend.load("kv", HASHES, pool.slots(0, 1)) == [False, False]
    assert backend.save("kv", HASHES, pool.slots(0, 1)) == [False, False]
    assert backend.load_flat(HASHES, [pool.get_dummy_flat_data_page()] * 2) == [False, False]
    assert backend.save_flat(HASHES, [pool.get_data_page(0)] * 2) == [False, False]
    backend.describe()
    backend.clear()
    backend.close()


def unidentified(config: Any) -> Any:
    raise ConfigError("the weights of 'x' cannot be identified: set weights_id in the extra config")


@pytest.mark.parametrize(
    "extra_config, identify, message",
    [
        ({"load_timeout_ms": "soon"}, lambda config: engine_facts(), "load_timeout_ms"),
        ({"store_address": "http://x"}, lambda config: engine_facts(), "store address"),
        ({"planes": ["pigeon"]}, lambda config: engine_facts(), "pigeon"),
        ({}, unidentified, "weights_id"),
        ({}, lambda config: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_logged_and_has_nothing(
    extra_config: dict[str, Any], identify: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = MhaPool()
    with caplog.at_level(logging.ERROR):
        backend = Attachment(extra_config, RankFacts(), identify)
    assert message in caplog.text
    backend.add_pool(pool, "kv", np.arange(4))
    assert_has_nothing(backend, pool)


def test_no_store_at_all_costs_nothing_but_misses() -> None:
    pool = MhaPool()
    backend = Attachment({"store_address": "127.0.0.1:1"}, RankFacts(), lambda config: engine_facts())
    backend.add_pool(pool, "kv", np.arange(4))
    assert_has_nothing(backend, pool)
    assert backend.errors_total == 0


def test_after_close_everything_is_a_miss() -> None:
    store, pool = FakeStore(), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    backend.save("kv", HASHES, pool.slots(0, 1))
    backend.close()
    assert_has_nothing(backend, pool)
    again = Engine(store, pool).backend
    assert again.num_leading(HASHES) == 2


def test_slots_that_do_not_fit_the_pages_move_no_byte(caplog: pytest.LogCaptureFixture) -> None:
    store, pool = FakeStore(), MhaPool(fill=1)
    backend = Engine(store, pool).backend
    with caplog.at_level(logging.ERROR):
        assert backend.save("kv", HASHES, pool.slots(0)) == [False, False]
        assert backend.load("kv", HASHES, pool.slots(0, 1, 2)) == [False, False]
    assert not store.objects
    assert backend.errors_total == 2
    assert "4 slots for 2 pages" in caplog.text


def test_an_address_outside_the_pool_is_not_touched() -> None:
    class Wild(MhaPool):
        is_wild = False

        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            addresses, sizes = super().get_page_buffer_meta(indices)
            return [address + (1 << 40) * self.is_wild for address in addresses], sizes

    pool = Wild(fill=1)
    backend = Engine(FakeStore(), pool).backend
    assert backend.save("kv", HASHES, pool.slots(0, 1)) == [True, True]
    pool.is_wild = True
    assert backend.load("kv", HASHES, pool.slots(0, 1)) == [False, False]


def test_a_pool_that_cannot_be_stored_is_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    class Sealed(MhaPool):
        def get_dummy_flat_data_page(self) -> Any:
            raise NotImplementedError("no flat pages")

    pool = Sealed(gives_addresses=False)
    with caplog.at_level(logging.ERROR):
        engine = Engine(FakeStore(), pool)
    assert "kv: SGLang gives its pages neither in place nor flat: no flat pages" in caplog.text
    assert_has_nothing(engine.backend, MhaPool())


def test_tensors_on_a_device_are_refused() -> None:
    pool = MhaPool(fill=1)
    backend = Engine(FakeStore(), pool, extra_config={"interface_v1": 0}).backend
    page = HostTensor(pool.get_data_page(0).array, "cuda")
    assert backend.save_flat(HASHES[:1], [page]) == [False]
    assert backend.errors_total == 1


def test_it_says_where_pages_go(caplog: pytest.LogCaptureFixture) -> None:
    backend = Engine(FakeStore(), MhaPool()).backend
    with caplog.at_level(logging.INFO):
        backend.describe()
    assert "127.0.0.1:50051 (kv: 384 bytes, page_first layers=0-3 regions 192+192)" in caplog.text
