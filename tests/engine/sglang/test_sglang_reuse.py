"""Pages go from one real SGLang to another through a real store: hits, tokens, log probabilities."""

from typing import Any

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.conftest import NewServer
from tests.engine.sglang.server import FULL_PAGES, PROMPT, hicache_flags, suite_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

# Every pair that SGLang accepts on CPU.
PAIRS = [
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_head", "kernel"),
]


def check_restored(restored: dict[str, Any], cold: dict[str, Any]) -> None:
    """At least 95 % from storage, and not a bit of difference."""
    assert restored["cached"]["storage"] >= 0.95 * len(PROMPT), restored["cached"]
    assert restored["cached"]["device"] == restored["cached"]["host"] == 0
    assert restored["tokens"] == cold["tokens"]
    differences = [abs(a - b) for a, b in zip(restored["logprobs"], cold["logprobs"], strict=True)]
    assert max(differences) == 0.0


@pytest.mark.parametrize(("layout", "io_backend"), PAIRS)
def test_another_engine_reuses_prefixes(
    new_server: NewServer, shared_store: StoreProcess, layout: str, io_backend: str
) -> None:
    # The way of copying says nothing about the bytes; two ways of one layout would share them.
    config = suite_config(shared_store, extra_backend_tag=io_backend)
    flags = hicache_flags(layout, io_backend, config)
    first, second = new_server(*flags), new_server(*flags)
    cold = first.generate(PROMPT)
    # One store for all layouts: what another layout has put there must not be found.
    assert sum(cold["cached"][tier] for tier in ("device", "host", "storage")) == 0
    assert len(set(cold["tokens"])) > 5, "an answer that says something"
    first.wait_saved()
    check_restored(second.generate(PROMPT), cold)
    first.flush()
    check_restored(first.generate(PROMPT), cold)
    first.wait_metrics(lambda found: found.get("sglang:storage_prefetch_hit_tokens_total") == FULL_PAGES)


def test_a_restarted_engine_reuses_prefixes_through_the_generic_interface(
    new_server: NewServer, shared_store: StoreProcess
) -> None:
    config = suite_config(shared_store, interface_v1=False, extra_backend_tag="generic")
    flags = hicache_flags("layer_first", "direct", config)
    first = new_server(*flags)
    cold = first.generate(PROMPT)
    first.wait_saved()
    first.close()
    check_restored(new_server(*flags).generate(PROMPT), cold)
