"""Chunked prefill, preemption, aborts and tensor parallelism: the awkward paths of vLLM's scheduler."""

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

Truth = Callable[..., list[list[int]]]


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_chunked_prefill_saves_and_loads_every_block(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth, load_mode: str
) -> None:
    chunked = {"max_num_batched_tokens": 128, "enable_chunked_prefill": True}
    prompts = [DOCUMENT[:1000], DOCUMENT[7:600]]
    truth = plain_tokens(prompts, MAX_TOKENS, **chunked)
    host.call(
        "start", engine={**engine_kwargs, **chunked}, transfer=transfer_config(store, load_mode=load_mode)
    )
    assert tokens_of(host.call("generate", requests=[request(prompt) for prompt in prompts])) == truth
    assert host.call("settle")["drained"]
    host.call("reset")
    # Half of the second prompt is new: chunks are computed on top of what was loaded.
    prompts.append(DOCUMENT[:500] + list(reversed(DOCUMENT[:500])))
    warm = host.call("generate", requests=[request(prompt) for prompt in prompts])
    assert tokens_of(warm)[:2] == truth
    assert tokens_of(warm)[2:] == plain_tokens(prompts[2:], MAX_TOKENS, **chunked)
    assert cached_of(warm) == [992, 576, 480]


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_preempted_requests_come_back_with_the_right_tokens(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth, load_mode: str
) -> None:
    """KV for two of the five requests: the others wait, run, are thrown out and resume."""
    prompts = [DOCUMENT[shift : shift + 200] for shift in range(5)]
    truth = plain_tokens(prompts, 100)
    # 4 layers x 2 KV heads x 64 x 2 x 4 bytes x 32 tokens = 128 KiB a block; 22 blocks.
    tight = {**engine_kwargs, "kv_cache_memory_bytes": 22 * (128 << 10), "max_model_len": 512}
    host.call("start", engine=tight, transfer=transfer_config(store, load_mode=load_mode))
    for _ in range(2):
        answer = host.call("generate", requests=[request(prompt, 100) for prompt in prompts])
        assert tokens_of(answer) == truth
        settled = host.call("settle")
        assert (settled["requests"], settled["usage"]) == (0, 0)
        assert metrics.HOOK_ERRORS_TOTAL not in settled["totals"]
        host.call("reset")
    assert host.call("preemptions")["count"] > 0, "the test must reach what it is about"


def test_a_request_that_is_aborted_while_it_loads_frees_its_blocks(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth
) -> None:
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    # Nobody will ever prefill these: their loads wait until the request leaves.
    waiting = [request(DOCUMENT[i : i + 400], params=pd_params("decode", f"t{i}")) for i in range(3)]
    answer = host.call("generate", requests=waiting, max_steps=5)
    assert answer["outputs"] == [None] * 3
    settled = host.call("settle")
    assert (settled["requests"], settled["usage"]) == (0, 0)
    prompt = DOCUMENT[:400]
    served = host.call("generate", requests=[request(prompt)])
    assert tokens_of(served) == plain_tokens([prompt], MAX_TOKENS)


def test_ranks_of_a_tensor_parallel_engine_share_their_halves(
    new_host: Callable[..., EngineHost],
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
) -> None:
    pair = new_host()
    engine = {**engine_kwargs, "tensor_parallel_size": 2}
    prompt = DOCUMENT[:300]
    pair.call("start", engine=engine, transfer=transfer_config(store))
    cold = pair.call("generate", requests=[request(prompt, 8)])
    pair.call("settle")
    pair.call("reset")
    warm = pair.call("generate", requests=[request(prompt, 8)])
    assert tokens_of(warm) == tokens_of(cold)
    assert cached_of(warm) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    # Whoever loads from one half must not load from the whole, nor the other way round.
    pair.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    assert cached_of(pair.call("generate", requests=[request(prompt, 8)])) == [0]
    pair.close()
