"""Processes that are killed in the middle: engines go on, tokens stay right, nothing half-written is seen."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import KeyInfo
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
PROMPT = DOCUMENT[:900]
FULL = (len(PROMPT) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def list_keys(store: StoreProcess) -> list[KeyInfo]:
    with StoreClient.connect(store.address) as client:
        keys, cursor = client.list_keys()
        assert cursor == 0
        return keys


def use_store_again(engine: EngineHost, truth: list[list[int]]) -> None:
    """Requests until one finds its prefix in the store again: reconnecting takes a moment."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        engine.call("reset")
        answer = engine.call("generate", requests=[request(PROMPT)])
        assert tokens_of(answer) == truth
        if cached_of(answer) == [FULL]:
            return
        engine.call("settle")
        time.sleep(0.2)
    raise AssertionError("the store came back but was not used again")


@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_the_store_is_killed_during_a_load(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth, load_mode: str
) -> None:
    truth = plain_tokens([PROMPT], MAX_TOKENS)
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store, load_mode=load_mode))
    host.call("generate", requests=[request(PROMPT)])
    assert host.call("settle")["drained"]
    host.call("reset")
    host.call("kill_at", place="load", pid=store.pid)
    # Two requests of one prefix: in synchronous mode the second computes on blocks that do not come.
    both = host.call("generate", requests=[request(PROMPT), request(PROMPT)])
    store.wait_killed()
    assert tokens_of(both) == truth * 2
    assert tokens_of(host.call("generate", requests=[request(PROMPT)])) == truth
    settled = host.call("settle")
    assert (settled["requests"], settled["usage"]) == (0, 0)
    assert settled["totals"][metrics.LOADS_FAILED_TOTAL] >= 1
    assert metrics.HOOK_ERRORS_TOTAL not in settled["totals"]
    store.start()
    host.call("stop_killing")
    use_store_again(host, truth)


def test_the_store_is_killed_while_a_decode_engine_follows(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth
) -> None:
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    host.call("kill_at", place="load", pid=store.pid)
    leg = request(PROMPT, params=pd_params("decode", "t", wait_ms=200_000))
    assert tokens_of(host.call("generate", requests=[leg])) == plain_tokens([PROMPT], MAX_TOKENS)
    assert host.call("settle")["totals"][metrics.LOADS_FAILED_TOTAL] == 1


@pytest.mark.parametrize("planes", [["shm", "tcp"], ["tcp"]])
def test_the_store_is_killed_during_a_save(
    host: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
    planes: list[str],
) -> None:
    truth = plain_tokens([PROMPT], MAX_TOKENS)
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store, planes=planes))
    host.call("kill_at", place="save", pid=store.pid, after=2)
    assert tokens_of(host.call("generate", requests=[request(PROMPT)])) == truth
    store.wait_killed()
    settled = host.call("settle")
    assert settled["drained"]
    assert settled["totals"][metrics.SAVE_FAILED_BLOCKS_TOTAL] > 0
    store.start()
    host.call("stop_killing")
    use_store_again(host, truth)


@pytest.mark.parametrize("planes", [["shm", "tcp"], ["tcp"]])
def test_an_engine_is_killed_during_a_save(
    new_host: Callable[..., EngineHost],
    host: EngineHost,
    store: StoreProcess,
    engine_kwargs: dict[str, Any],
    plain_tokens: Truth,
    planes: list[str],
) -> None:
    transfer = transfer_config(store, planes=planes)
    victim = new_host()
    victim.call("start", engine=engine_kwargs, transfer=transfer)
    victim.call("kill_at", place="save", pid=0, after=2)
    victim.send("generate", requests=[request(PROMPT)])
    victim.wait_killed()
    victim.close()
    deadline = time.monotonic() + 30
    while any(key.layers_ready < key.num_layers for key in list_keys(store)):
        assert time.monotonic() < deadline, "reservations of a dead engine stay"
        time.sleep(0.05)
    host.call("start", engine=engine_kwargs, transfer=transfer)
    answer = host.call("generate", requests=[request(PROMPT)])
    assert cached_of(answer) == [0], "nothing half-written is ever offered"
    assert tokens_of(answer) == plain_tokens([PROMPT], MAX_TOKENS)
    assert host.call("settle")["totals"][metrics.SAVED_BLOCKS_TOTAL] >= FULL // BLOCK_TOKENS


def test_an_engine_starts_and_serves_without_a_store(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any], plain_tokens: Truth
) -> None:
    truth = plain_tokens([PROMPT], MAX_TOKENS)
    store.kill()
    host.call("start", engine=engine_kwargs, transfer=transfer_config(store))
    assert tokens_of(host.call("generate", requests=[request(PROMPT)])) == truth
    store.start()
    use_store_again(host, truth)
