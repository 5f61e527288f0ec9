"""Two real SGLang engines without a host cache, linked to one store."""

import json
from collections.abc import Callable

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.server import FULL_PAGES, PROMPT, SglangServer

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_second_engine_takes_the_prompt_from_the_store(
    new_server: Callable[..., SglangServer], shared_store: StoreProcess
) -> None:
    config = {
        "linker": "MooncakeSuiteLinker",
        "linker_module_path": "sglang_hicache_backend.linker",
        "linker_extra_config": {"store_address": shared_store.address, "lookup_timeout_ms": "20s"},
    }
    flags = ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
    flags += ["--unified-cache-external-linker-config", json.dumps(config)]
    first, second = (new_server(*flags) for _ in range(2))
    computed = first.generate(PROMPT)
    again = first.generate(PROMPT)
    assert again["cached"]["device"] >= FULL_PAGES - 16
    # Flushing waits for what is on its way to the store.
    first.flush()
    from_store = [server.generate(PROMPT) for server in (first, second)]
    for answer in from_store:
        assert answer["cached"]["host"] >= 0.95 * len(PROMPT), answer["cached"]
        assert answer["tokens"] == computed["tokens"]
        assert answer["logprobs"] == computed["logprobs"]
