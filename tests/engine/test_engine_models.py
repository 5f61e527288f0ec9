"""Models and caches of other kinds: what one engine saved a fresh one loads, and tokens stay the same."""

from typing import Any

import pytest

from kvcore import metrics
from tests.engine.rig import (
    BLOCK_TOKENS,
    DOCUMENT,
    EngineHost,
    StoreProcess,
    cached_of,
    engine_settings,
    make_tiny_model,
    request,
    tokens_of,
    transfer_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = DOCUMENT[:301]


def engine_of(kind: str) -> dict[str, Any]:
    if kind == "fp8":
        return engine_settings(make_tiny_model()) | {"kv_cache_dtype": "fp8"}
    if kind == "drafted":
        draft = {
            "method": "draft_model",
            "model": make_tiny_model("--layers", "2"),
            "num_speculative_tokens": 3,
        }
        return engine_settings(make_tiny_model()) | {"speculative_config": draft}
    return engine_settings(make_tiny_model(kind=f"tiny-{kind}")) | {"dtype": "bfloat16"}


@pytest.mark.parametrize("kind", ["gemma3", "fp8", "drafted"])
def test_a_fresh_engine_loads_what_another_saved(host: EngineHost, store: StoreProcess, kind: str) -> None:
    engine = engine_of(kind)
    block_tokens = engine["block_size"]
    host.call("start", engine=engine, transfer=None)
    truth = tokens_of(host.call("generate", requests=[request(PROMPT)]))
    for cached in (0, (len(PROMPT) - 1) // block_tokens * block_tokens):
        assert host.call("start", engine=engine, transfer=transfer_config(store))["reason"] == ""
        answer = host.call("generate", requests=[request(PROMPT)])
        assert (tokens_of(answer), cached_of(answer)) == (truth, [cached])
        settled = host.call("settle")
        assert (settled["drained"], settled["requests"], settled["usage"]) == (True, 0, 0)
        assert metrics.HOOK_ERRORS_TOTAL not in settled["totals"]


def test_a_model_of_mla_is_shared_where_its_kernel_looks_at_earlier_kv(
    host: EngineHost, store: StoreProcess
) -> None:
    """On a CPU without AMX it does not, and vLLM has no prefix cache either."""
    import torch

    shared = torch.cpu._is_amx_tile_supported()
    engine = engine_of("mla")
    host.call("start", engine=engine, transfer=None)
    truth = tokens_of(host.call("generate", requests=[request(PROMPT)]))
    for cached in (0, (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS if shared else 0):
        reason = host.call("start", engine=engine, transfer=transfer_config(store))["reason"]
        assert (reason == "") is shared
        answer = host.call("generate", requests=[request(PROMPT)])
        assert (tokens_of(answer), cached_of(answer)) == (truth, [cached])
        assert host.call("settle")["drained"]
