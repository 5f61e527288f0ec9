"""Prefixes go from one real engine to another through a real store, and greedy tokens stay the same."""

from collections.abc import Callable
from pathlib import Path
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

PROMPTS = [
    DOCUMENT[:540] + list(b"Question A?"),
    DOCUMENT[:300] + list(b"Question B!!"),
    DOCUMENT[100:420],  # ends on a block's edge
    list(b"short"),
]
# Full blocks of each prompt, less one token that is always computed.
FULL = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS]
REQUESTS = [request(prompt) for prompt in PROMPTS]
Truth = Callable[..., list[list[int]]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_another_engine_and_a_restarted_one_reuse_prefixes(
    host: EngineHost,
    peer: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
    load_mode: str,
    dtype: str,
) -> None:
    engine = {**engine_kwargs, "dtype": dtype}
    truth = plain_tokens(PROMPTS, MAX_TOKENS, dtype=dtype)
    transfer = transfer_config(store, load_mode=load_mode)

    started = host.call("start", engine=engine, transfer=transfer)
    assert started["reason"] == ""
    cold = host.call("generate", requests=REQUESTS)
    assert tokens_of(cold) == truth
    settled = host.call("settle")
    assert settled["drained"]
    assert settled["totals"][metrics.SAVED_BLOCKS_TOTAL] > 0

    assert peer.call("start", engine=engine, transfer=transfer)["namespace"] == started["namespace"]
    warm = peer.call("generate", requests=REQUESTS)
    assert (tokens_of(warm), cached_of(warm)) == (truth, FULL)

    # A restart: nothing is left in the process but the store's address.
    host.call("start", engine=engine, transfer=transfer)
    again = host.call("generate", requests=REQUESTS)
    assert (tokens_of(again), cached_of(again)) == (truth, FULL)
    settled = host.call("settle")
    assert settled["totals"][metrics.LOADED_BLOCKS_TOTAL] > 0
    assert metrics.SAVED_BLOCKS_TOTAL not in settled["totals"], "everything was there already"
    assert metrics.HOOK_ERRORS_TOTAL not in settled["totals"]
    assert (settled["requests"], settled["usage"]) == (0, 0)


def test_decoded_blocks_serve_the_next_turn_of_a_chat(
    host: EngineHost,
    peer: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
) -> None:
    transfer = transfer_config(store)
    host.call("start", engine=engine_kwargs, transfer=transfer)
    prompt, num_answer = DOCUMENT[:100], 3 * BLOCK_TOKENS
    [answer] = tokens_of(host.call("generate", requests=[request(prompt, num_answer)]))
    host.call("settle")
    # The last token was sampled, but its KV never computed.
    computed = len(prompt) + num_answer - 1
    turn = prompt + answer + list(b"And then?")
    peer.call("start", engine=engine_kwargs, transfer=transfer)
    second = peer.call("generate", requests=[request(turn)])
    assert cached_of(second) == [computed // BLOCK_TOKENS * BLOCK_TOKENS]
    assert tokens_of(second) == plain_tokens([turn], MAX_TOKENS)


def test_engines_that_differ_never_share_a_byte(
    host: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
    make_model: Callable[..., str],
) -> None:
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    host.call("generate", requests=REQUESTS)
    assert host.call("settle")["totals"][metrics.SAVED_BLOCKS_TOTAL] > 0
    strangers: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"model": make_model("--seed", "7")},  # as a fine-tuned copy: other weights, nothing else
        {"block_size": 64},
        {"prefix_caching_hash_algo": "sha256"},
    ]
    for changes in strangers:
        host.call("start", engine={**engine_kwargs, **changes}, transfer=transfer_config(store))
        answer = host.call("generate", requests=REQUESTS)
        assert cached_of(answer)[0] == 0, changes
        assert tokens_of(answer) == plain_tokens(PROMPTS, MAX_TOKENS, **changes), changes
        assert metrics.LOADED_BLOCKS_TOTAL not in host.call("settle")["totals"], changes
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store, tenant="other"))
    assert cached_of(host.call("generate", requests=REQUESTS))[0] == 0


def test_old_and_new_vllm_find_each_others_blocks(
    new_host: Callable[..., EngineHost],
    peer: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
    old_vllm: Path,
) -> None:
    old = new_host(python_path=[old_vllm])
    old_version = old_vllm.name.rsplit("-", 1)[1]
    for dtype in ("float32", "bfloat16"):
        engine, transfer = {**engine_kwargs, "dtype": dtype}, transfer_config(store)
        truth = plain_tokens(PROMPTS, MAX_TOKENS, dtype=dtype)
        assert old.call("start", engine=engine, transfer=transfer)["version"].startswith(old_version)
        assert not peer.call("start", engine=engine, transfer=transfer)["version"].startswith(old_version)

        assert tokens_of(old.call("generate", requests=REQUESTS[:1])) == truth[:1]
        assert old.call("settle")["drained"]
        answer = peer.call("generate", requests=REQUESTS[:1])
        assert (tokens_of(answer), cached_of(answer)) == (truth[:1], FULL[:1])

        peer.call("generate", requests=REQUESTS[2:3])
        peer.call("settle")
        answer = old.call("generate", requests=REQUESTS[2:3])
        assert (tokens_of(answer), cached_of(answer)) == (truth[2:3], FULL[2:3])

    # What is asked about every token of a prompt needs them computed; 0.28 does not see to it by itself.
    for engine in (old, peer):
        engine.call("reset")
        answer = engine.call("generate", requests=[REQUESTS[0] | {"prompt_logprobs": 1}])
        assert (tokens_of(answer), cached_of(answer)) == (truth[:1], [0])
        assert answer["outputs"][0]["num_prompt_logprobs"] == len(PROMPTS[0])

    # And as a pair, either way round.
    for prefill, decode, prompt in ((old, peer, DOCUMENT[13:600]), (peer, old, DOCUMENT[17:600])):
        decode.send("generate", requests=[request(prompt, params=pd_params("decode", "t"))])
        prefill.call("generate", requests=[request(prompt, 1, pd_params("prefill", "t"))])
        answer = decode.receive()
        assert cached_of(answer) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        assert tokens_of(answer) == plain_tokens([prompt], MAX_TOKENS, dtype="bfloat16")
    old.close()


def test_an_engine_whose_hashes_are_random_shares_nothing_and_says_why(
    new_host: Callable[..., EngineHost], store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    random_root = new_host(environment={"PYTHONHASHSEED": None})
    engine = {**engine_kwargs, "prefix_caching_hash_algo": "xxhash"}
    started = random_root.call("start", engine=engine, transfer=transfer_config(store))
    assert "PYTHONHASHSEED" in started["reason"]
    first = random_root.call("generate", requests=REQUESTS[:1])
    random_root.call("reset")
    second = random_root.call("generate", requests=REQUESTS[:1])
    assert tokens_of(first) == tokens_of(second)
    assert cached_of(second) == [0]
    random_root.close()
