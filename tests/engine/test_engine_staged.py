"""Real engines whose KV cache passes through the staging rings, as on a device (`staging: always`)."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import metrics
from tests.engine.rig import (
    BLOCK_TOKENS,
    DOCUMENT,
    MAX_TOKENS,
    EngineHost,
    StoreProcess,
    cached_of,
    pd_params,
    request,
    tokens_of,
    transfer_config,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = [DOCUMENT[:540] + list(b"Question A?"), DOCUMENT[:300] + list(b"Question B!!"), DOCUMENT[100:420]]
FULL = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS]
REQUESTS = [request(prompt) for prompt in PROMPTS]
BLOCK_SIZE_BYTES = 4 * 2 * BLOCK_TOKENS * 128 * 4  # layers, heads, tokens, key and value, float32
# Three blocks a ring: long prompts land in many pieces, and requests take turns.
TIGHT = {"staging": "always", "load_staging_size_bytes": 6 * BLOCK_SIZE_BYTES}


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_staged_and_direct_engines_share_prefixes(
    host: EngineHost,
    peer: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Callable[..., list[list[int]]],
    load_mode: str,
) -> None:
    truth = plain_tokens(PROMPTS, MAX_TOKENS)
    direct, staged = (transfer_config(store, load_mode=load_mode, **extra) for extra in ({}, TIGHT))

    started = host.call("start", engine=engine_kwargs, transfer=staged)
    assert started["reason"] == ""
    assert tokens_of(host.call("generate", requests=REQUESTS)) == truth
    saved = host.call("settle")["totals"]
    assert saved[metrics.SAVED_BLOCKS_TOTAL] > 0
    assert metrics.SAVE_SKIPPED_STAGING_TOTAL not in saved

    assert peer.call("start", engine=engine_kwargs, transfer=direct)["namespace"] == started["namespace"]
    warm = peer.call("generate", requests=REQUESTS)
    assert (tokens_of(warm), cached_of(warm)) == (truth, FULL)

    host.call("start", engine=engine_kwargs, transfer=staged)
    again = host.call("generate", requests=REQUESTS)
    assert (tokens_of(again), cached_of(again)) == (truth, FULL)
    loaded = host.call("settle")["totals"]
    assert loaded[metrics.LOADED_BLOCKS_TOTAL] > 0
    assert not {metrics.LOADS_FAILED_TOTAL, metrics.HOOK_ERRORS_TOTAL}.intersection(loaded)


def test_a_staged_decode_engine_follows_a_staged_prefill_engine(
    host: EngineHost,
    peer: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Callable[..., list[list[int]]],
) -> None:
    prompt = DOCUMENT[7:600]
    for each in (host, peer):
        assert (
            each.call("start", engine=engine_kwargs, transfer=transfer_config(store, **TIGHT))["reason"] == ""
        )
    peer.send("generate", requests=[request(prompt, params=pd_params("decode", "t"))])
    host.call("generate", requests=[request(prompt, 1, pd_params("prefill", "t"))])
    answer = peer.receive()
    assert cached_of(answer) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert tokens_of(answer) == plain_tokens([prompt], MAX_TOKENS)
    totals = peer.call("settle")["totals"]
    assert not {metrics.LOADS_FAILED_TOTAL, metrics.HOOK_ERRORS_TOTAL}.intersection(totals)


def test_a_staged_engine_whose_ring_does_not_hold_a_block_shares_nothing_and_says_why(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    tiny = transfer_config(store, staging="always", load_staging_size_bytes=1000)
    assert "load_staging_size_bytes" in host.call("start", engine=engine_kwargs, transfer=tiny)["reason"]
    assert len(tokens_of(host.call("generate", requests=REQUESTS[:1]))) == 1
