"""A prefill and a decode engine at work on one request at the same time."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
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


class Pair:
    """Both engines, and both legs of a request as the router sends them."""

    def __init__(self, prefill: EngineHost, decode: EngineHost) -> None:
        self.prefill = prefill
        self.decode = decode

    def send(self, prompt: list[int], wait_ms: int = 60_000, *, prefill: bool = True, **options: Any) -> None:
        decode_leg = request(prompt, params=pd_params("decode", "t", wait_ms))
        self.decode.send("generate", requests=[decode_leg])
        if prefill:
            leg = request(prompt, 1, pd_params("prefill", "t"))
            self.prefill.send("generate", requests=[leg], **options)


@pytest.fixture(scope="module")
def pair_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = StoreProcess(tmp_path_factory.mktemp("store"))
    yield store
    store.close()


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("traces")
    return directory / "prefill.jsonl", directory / "decode.jsonl"


@pytest.fixture(scope="module")
def pair(
    host: EngineHost,
    peer: EngineHost,
    pair_store: StoreProcess,
    engine_kwargs: dict[str, Any],
    traces: tuple[Path, Path],
) -> Pair:
    chunked = {**engine_kwargs, "max_num_batched_tokens": 1024}
    for engine, trace in zip((host, peer), traces, strict=True):
        engine.call("start", engine=chunked, transfer=transfer_config(pair_store, trace_path=str(trace)))
    return Pair(host, peer)


def read_trace(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_decode_engine_loads_layers_while_the_prefill_engine_computes(
    pair: Pair, traces: tuple[Path, Path], plain_tokens: Truth
) -> None:
    """Of several prompts: on a busy machine the decode engine may not get a CPU before one is computed."""
    for start in range(5):
        prompt = DOCUMENT[start : start + 1700]
        pair.send(prompt)
        prefilled, decoded = pair.prefill.receive(), pair.decode.receive()
        assert tokens_of(decoded) == plain_tokens([prompt], MAX_TOKENS, max_num_batched_tokens=1024)
        num_blocks = (len(prompt) - 1) // BLOCK_TOKENS
        assert cached_of(decoded) == [num_blocks * BLOCK_TOKENS], "all but the last partial block came from P"
        saved = prefilled["outputs"][0]["params"]["mooncake_pd"]
        of_all = {"saved_blocks": num_blocks, "loaded_blocks": 0}
        assert saved == {"role": "prefill", "transfer_id": "t", **of_all}
        loaded = decoded["outputs"][0]["params"]["mooncake_pd"]
        assert (loaded["role"], loaded["loaded_blocks"]) == ("decode", num_blocks)
        if has_overlapped(*traces):
            return
    raise AssertionError("the decode engine waited for whole blocks")


def has_overlapped(prefill: Path, decode: Path) -> bool:
    """Whether layer 0 of a block was loaded before its last one was in the store."""
    committed = {
        (line["block"], line["layer"]): line["ns"]
        for line in read_trace(prefill)
        if line["event"] == "save_layer_committed"
    }
    first_layer = {
        line["block"]: line["ns"]
        for line in read_trace(decode)
        if line["event"] == "load_layer_done" and line["layer"] == 0
    }
    last = max(layer for _, layer in committed)
    both = [block for block, layer in committed if layer == last and block in first_layer]
    assert both, "both engines trace the first block of the prompt"
    return any(first_layer[block] < committed[block, last] for block in both)


def test_a_prompt_seen_before_is_taken_from_the_store_at_once(pair: Pair) -> None:
    prompt = DOCUMENT[:1700]
    pair.decode.call("reset")
    pair.send(prompt, prefill=False)
    assert cached_of(pair.decode.receive()) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]


def test_a_prefill_engine_that_has_the_prompt_itself_still_hands_it_over(
    pair: Pair, pair_store: StoreProcess, plain_tokens: Truth
) -> None:
    prompt = DOCUMENT[3:700]
    pair.send(prompt)
    pair.prefill.receive()
    pair.decode.receive()
    pair.prefill.call("settle")
    empty_store(pair_store)
    pair.decode.call("reset")
    pair.send(prompt)
    prefilled, decoded = pair.prefill.receive(), pair.decode.receive()
    assert cached_of(prefilled)[0] > 0, "P found it in its own prefix cache"
    assert cached_of(decoded) == [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert tokens_of(decoded) == plain_tokens([prompt], MAX_TOKENS, max_num_batched_tokens=1024)


def empty_store(store: StoreProcess) -> None:
    """Evicts everything; what was read a moment ago may still be under lease for a while."""
    deadline = time.monotonic() + 60
    with StoreClient.connect(store.address) as client:
        while client.list_keys()[0]:
            client.evict(0)
            assert time.monotonic() < deadline, "something keeps blocks from being evicted"
            time.sleep(0.05)


def test_an_aborted_prefill_wakes_the_decode_engine_which_computes_the_rest_itself(
    pair: Pair, plain_tokens: Truth
) -> None:
    prompt = DOCUMENT[11:1900]
    pair.decode.call("settle")
    # One step computes 1024 of the 1889 tokens, then the prefill leg leaves.
    pair.send(prompt, wait_ms=200_000, max_steps=1)
    assert pair.prefill.receive()["outputs"] == [None]
    decoded = pair.decode.receive()
    assert tokens_of(decoded) == plain_tokens([prompt], MAX_TOKENS, max_num_batched_tokens=1024)
    totals = pair.decode.call("settle")["totals"]
    assert totals[metrics.LOADS_FAILED_TOTAL] >= 1


def test_a_prefill_that_never_comes_costs_its_wait_and_no_more(pair: Pair, plain_tokens: Truth) -> None:
    prompt = DOCUMENT[17:500]
    pair.send(prompt, wait_ms=300, prefill=False)
    decoded = pair.decode.receive()
    assert tokens_of(decoded) == plain_tokens([prompt], MAX_TOKENS, max_num_batched_tokens=1024)
    settled = pair.decode.call("settle")
    assert (settled["requests"], settled["usage"]) == (0, 0)


def test_a_store_without_room_makes_the_decode_engine_compute(
    pair: Pair, engine_kwargs: dict[str, Any], tmp_path: Path, plain_tokens: Truth
) -> None:
    small = StoreProcess(tmp_path, pool_size="2mb")
    for engine in (pair.prefill, pair.decode):
        engine.call("start", engine=engine_kwargs, transfer=transfer_config(small))
    prompt = DOCUMENT[:1500]
    pair.send(prompt, wait_ms=200_000)
    pair.prefill.receive()
    assert tokens_of(pair.decode.receive()) == plain_tokens([prompt], MAX_TOKENS)
    totals = pair.prefill.call("settle")["totals"]
    assert totals[metrics.SAVE_SKIPPED_FULL_TOTAL] > 0
    small.close()
