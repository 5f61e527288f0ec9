"""vLLM's NixlConnector protocol, with engines that speak its shapes: P first, what it says to D, failures."""

import asyncio
import json
from typing import Any

import pytest

from tests.integration.router_harness import (
    MockEngine,
    Turn,
    async_test,
    dies,
    fails,
    hangs,
    running,
    until,
    well,
)

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time", "max_tokens": 3}
STREAM = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}
# As vLLM 0.32's NixlConnector answers, with a key nobody knows yet.
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-0",
    "remote_request_id": "cmpl-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "some_future_key": {"deep": [1.50]},
}


async def prefills(turn: Turn) -> None:
    usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    await turn.answer(200, {"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": PARAMS})


async def prefills_without_params(turn: Turn) -> None:
    await turn.answer(200, {"choices": [], "kv_transfer_params": None})


def nixl(prefill: int = 1, decode: int = 1, **config: Any) -> Any:
    return running(prefill=prefill, decode=decode, pd_protocol="nixl", **config)


def prefilling(*engines: MockEngine) -> None:
    for engine in engines:
        engine.default = prefills


@async_test
async def test_prefill_then_decode_with_its_parameters() -> None:
    async with nixl() as setup:
        prefilling(setup.engines["p0"])
        answer = await setup.ask(COMPLETIONS, {**STREAM, "min_tokens": 2}, "x-request-id: mine\r\n")
        (prefill,), (decode,) = setup.engines["p0"].seen, setup.engines["d0"].seen
    assert answer.events[-1] == "[DONE]"
    assert answer.headers["x-mooncake-prefill-cached-tokens"] == "2"
    assert prefill.body["max_tokens"] == 1 and prefill.body["stream"] is False
    assert "stream_options" not in prefill.body and "min_tokens" not in prefill.body
    assert prefill.body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert decode.body == {**STREAM, "min_tokens": 2, "kv_transfer_params": PARAMS}
    assert json.dumps(PARAMS["some_future_key"]) in decode.raw_body.decode()
    assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == "mine"


@async_test
async def test_without_parameters_the_decode_engine_computes_it_all() -> None:
    async with nixl() as setup:
        setup.engines["p0"].default = prefills_without_params
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[0].body == PROMPT
        assert setup.router.metrics.decode_only == 1


@async_test
async def test_another_prefill_engine_then_decode_alone() -> None:
    async with nixl(prefill=2) as setup:
        prefilling(setup.engines["p0"], setup.engines["p1"])
        setup.engines["p0"].script.append(fails(500))
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[-1].body["kv_transfer_params"] == PARAMS
        setup.engines["p0"].default = setup.engines["p1"].default = dies
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[-1].body == PROMPT


@async_test
async def test_a_bad_request_is_answered_by_the_prefill_engine() -> None:
    async with nixl() as setup:
        setup.engines["p0"].default = fails(400)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.status == 400 and "p0 says 400" in answer.json["error"]["message"]
        assert setup.engines["d0"].seen == []


@async_test
async def test_another_decode_engine_gets_the_same_parameters_and_nobody_prefills_again() -> None:
    async with nixl(decode=2) as setup:
        prefilling(setup.engines["p0"])
        setup.engines["d0"].default = fails(503, "retry-after: 9\r\n")
        for _ in range(2):
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert len(setup.engines["p0"].seen) == 2
        assert all(seen.body["kv_transfer_params"] == PARAMS for seen in setup.engines["d1"].seen)
        setup.engines["d1"].default = fails(429, "retry-after: 4\r\n")
        refused = await setup.ask(COMPLETIONS, PROMPT)
        assert refused.status in (429, 503) and refused.headers["retry-after"] in ("4", "9")
        assert len(setup.engines["p0"].seen) == 3


@async_test
async def test_a_client_that_leaves_frees_whoever_works_for_it() -> None:
    async with nixl() as setup:
        setup.engines["p0"].default = hangs
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["p0"].seen) == 1)
        client.close()
        await until(lambda: setup.engines["p0"].num_abandoned == 1)
        assert setup.engines["d0"].seen == []
        prefilling(setup.engines["p0"])
        setup.engines["d0"].default = hangs
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["d0"].seen) == 1)
        client.close()
        await until(lambda: setup.engines["d0"].num_abandoned == 1)


@async_test
async def test_a_prefill_that_never_ends_is_a_504() -> None:
    async with nixl(request_timeout_ms=500) as setup:
        setup.engines["p0"].default = hangs
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 504
        await until(lambda: setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_the_decode_engine_that_went_down_during_the_prefill_is_not_asked() -> None:
    go_on = asyncio.Event()

    async def late(turn: Turn) -> None:
        await go_on.wait()
        await prefills(turn)

    async with nixl(decode=2) as setup:
        setup.engines["p0"].default = late
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["p0"].seen) == 1)
        view = setup.router.cluster.book.view(0.0)
        chosen = next(i.instance_id for i in view.decode if i.in_flight_requests)
        setup.router.cluster.instances[chosen].draining = True
        go_on.set()
        assert (await client.answer()).status == 200
        other = next(e for e in setup.engines.values() if e.name[0] == "d" and e.url != chosen)
        assert other.seen[0].body["kv_transfer_params"] == PARAMS


@async_test
async def test_no_prefill_engine_left_is_decode_only() -> None:
    async with nixl() as setup:
        setup.router.cluster.instances[setup.engines["p0"].url].draining = True
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[0].body == PROMPT and setup.engines["d0"].default is well


@async_test
async def test_blocks_that_may_have_been_freed_are_never_fetched_again() -> None:
    async with nixl(decode=2) as setup:
        prefilling(setup.engines["p0"])
        setup.engines["d0"].default = setup.engines["d1"].default = dies
        setup.engines["d1"].script.append(well)
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[0].body == {**PROMPT, "kv_transfer_params": PARAMS}
        assert [seen.body for seen in setup.engines["d1"].seen] == [PROMPT]
        assert len(setup.engines["p0"].seen) == 1 and setup.router.metrics.decode_only == 1


def test_parameters_are_not_used_when_the_lease_may_be_over(monkeypatch: pytest.MonkeyPatch) -> None:
    @async_test
    async def check() -> None:
        async with nixl(decode=2) as setup:

            async def busy_for_long(turn: Turn) -> None:
                monkeypatch.setattr("router.protocols.nixl.PARAMS_VALID_S", -1.0)
                await fails(503)(turn)

            prefilling(setup.engines["p0"])
            setup.engines["d0"].default = busy_for_long
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
            assert setup.engines["d0"].seen[0].body["kv_transfer_params"] == PARAMS
            assert setup.engines["d1"].seen[0].body == PROMPT

    check()


@pytest.mark.parametrize(
    "several",
    [
        {"prompt": ["Once upon", "a time"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "prompt_embeds": "b"},
        {"prompt_embeds": ["a", "b"]},
        {"n": 2},
        {"n": "2"},
        {"n": 2.0},
    ],
    ids=repr,
)
def test_several_sequences_never_share_one_prompts_blocks(several: dict[str, Any]) -> None:
    @async_test
    async def run() -> None:
        async with nixl(prefill=2) as setup:
            prefilling(setup.engines["p0"], setup.engines["p1"])
            body = {**PROMPT, **several}
            assert (await setup.ask(COMPLETIONS, body)).status == 200
            assert [setup.engines[name].seen for name in ("p0", "p1")] == [[], []]
            assert setup.engines["d0"].seen[0].body == body

    run()


@pytest.mark.parametrize(
    "one",
    [{"prompt": ["a"]}, {"prompt": [[1, 2]]}, {"prompt": [1, 2]}, {"n": 1}, {"n": None}, {"n": [2]}],
    ids=repr,
)
def test_one_sequence_is_prefilled_however_it_is_written(one: dict[str, Any]) -> None:
    @async_test
    async def run() -> None:
        async with nixl() as setup:
            prefilling(setup.engines["p0"])
            await setup.ask(COMPLETIONS, {**PROMPT, **one})
            assert setup.engines["d0"].seen[0].body["kv_transfer_params"] == PARAMS

    run()
