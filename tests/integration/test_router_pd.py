"""Our P/D protocol between a prefill and a decode pool: both legs at once, and every way one can fail."""

import asyncio
import json

import pytest

from tests.integration.router_harness import (
    Behaviour,
    Setup,
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
CHAT = "/v1/chat/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time", "max_tokens": 3}
STREAM = {**PROMPT, "stream": True}


def body_without_transfer(body: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in body.items() if name != "kv_transfer_params"}


@async_test
async def test_both_legs_carry_what_their_engine_needs() -> None:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "h\u00e9llo"}],
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 5,
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "s",
        "kv_transfer_params": {"other": {"kept": 1}},
    }
    headers = "authorization: Bearer k\r\ntraceparent: 00-ab-cd-01\r\nx-request-id: mine\r\n"
    async with running(prefill=1, decode=1, pd_wait_ms=1234) as setup:
        answer = await setup.ask(CHAT, request, headers)
        assert answer.events[-1] == "[DONE]" and answer.headers["x-request-id"] == "mine"
        (prefill,), (decode,) = setup.engines["p0"].seen, setup.engines["d0"].seen
    same = {"model": "m", "messages": request["messages"], "cache_salt": "s"}
    assert body_without_transfer(prefill.body) == {
        **same,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
    }
    assert body_without_transfer(decode.body) == body_without_transfer(request)
    assert prefill.body["kv_transfer_params"]["other"] == {"kept": 1}
    transfer_id = prefill.transfer["transfer_id"]
    assert prefill.transfer == {"role": "prefill", "transfer_id": transfer_id, "wait_ms": 1234}
    assert decode.transfer == {"role": "decode", "transfer_id": transfer_id, "wait_ms": 1234}
    for leg in (prefill, decode):
        assert leg.path == CHAT
        assert leg.headers["x-request-id"] == "mine"
        assert leg.headers["authorization"] == "Bearer k"
        assert leg.headers["traceparent"] == "00-ab-cd-01"


@async_test
async def test_a_made_request_id_is_the_same_on_both_legs_and_transfers_differ() -> None:
    async with running(prefill=1, decode=1) as setup:
        for _ in range(2):
            await setup.ask(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["p0"].seen) == 2)
        prefill, decode = setup.engines["p0"].seen, setup.engines["d0"].seen
        assert [s.headers["x-request-id"] for s in prefill] == [s.headers["x-request-id"] for s in decode]
        assert [s.transfer["transfer_id"] for s in prefill] == [s.transfer["transfer_id"] for s in decode]
        assert prefill[0].transfer["transfer_id"] != prefill[1].transfer["transfer_id"]


@async_test
async def test_the_decode_engine_is_asked_while_the_prefill_engine_computes() -> None:
    go_on = asyncio.Event()

    async def slow_prefill(turn: Turn) -> None:
        await go_on.wait()
        await well(turn)

    async with running(prefill=1, decode=1) as setup:
        setup.engines["p0"].script.append(slow_prefill)
        answer = await setup.ask(COMPLETIONS, STREAM)
        assert answer.events[-1] == "[DONE]"
        assert setup.in_flight == 1  # the prefill, which may end by itself
        go_on.set()
        await until(lambda: setup.in_flight == 0)
        assert setup.engines["p0"].num_abandoned == 0


@async_test
async def test_a_prefill_nobody_needs_any_more_is_closed_after_a_while() -> None:
    async with running(prefill=1, decode=1) as setup:
        setup.engines["p0"].script.append(hangs)
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "d0"
        await until(lambda: setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_pools_have_policies_of_their_own() -> None:
    async with running(
        prefill=2, decode=2, prefill_policy="round_robin", decode_policy="least_loaded"
    ) as setup:
        for _ in range(4):
            await setup.ask(COMPLETIONS, PROMPT)
        await until(lambda: setup.in_flight == 0)
        assert [len(setup.engines[p].seen) for p in ("p0", "p1")] == [2, 2]


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_request_the_prefill_engine_calls_bad_gets_its_error_and_no_decode(status: int) -> None:
    @async_test
    async def check() -> None:
        async with running(prefill=2, decode=1) as setup:
            for name in ("p0", "p1"):
                setup.engines[name].default = fails(status)
            setup.engines["d0"].default = hangs
            answer = await setup.ask(COMPLETIONS, STREAM)
            assert answer.status == status
            assert "says" in answer.json["error"]["message"]
            await until(lambda: setup.engines["d0"].num_abandoned == 1)
            assert sum(len(setup.engines[p].seen) for p in ("p0", "p1")) == 1

    check()


@async_test
async def test_an_answer_under_way_is_not_taken_back_for_a_late_prefill_error() -> None:
    go_on = asyncio.Event()

    async def late_error(turn: Turn) -> None:
        await go_on.wait()
        await fails(400)(turn)

    async def slow_stream(turn: Turn) -> None:
        await turn.begin_stream()
        await turn.event("first")
        go_on.set()
        await until(lambda: setup.in_flight == 1)
        await turn.end_stream()

    async with running(prefill=1, decode=1) as setup:
        setup.engines["p0"].script.append(late_error)
        setup.engines["d0"].script.append(slow_stream)
        assert (await setup.ask(COMPLETIONS, STREAM)).events == ["first", "[DONE]"]


@async_test
async def test_a_failed_prefill_is_tried_elsewhere_while_the_decode_engine_waits() -> None:
    waiting = asyncio.Event()

    async def decode_when_prefilled(turn: Turn) -> None:
        await waiting.wait()
        await well(turn)

    async def prefill(turn: Turn) -> None:
        await well(turn)
        waiting.set()

    async with running(prefill=2, decode=1) as setup:
        setup.engines["p0"].default = fails(500)
        setup.engines["p1"].default = prefill
        setup.engines["d0"].script.append(decode_when_prefilled)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.json["served_by"] == "d0"
        (first,), (second,), (decode,) = (setup.engines[n].seen for n in ("p0", "p1", "d0"))
        ids = {seen.transfer["transfer_id"] for seen in (first, second, decode)}
        assert len(ids) == 1
        assert setup.router.metrics.retries == {("prefill", "500"): 1}


@async_test
async def test_when_every_prefill_fails_the_decode_engine_goes_on_by_itself() -> None:
    failed = asyncio.Event()

    async def fail(turn: Turn) -> None:
        await fails(500)(turn)
        failed.set()

    async def decode(turn: Turn) -> None:
        await failed.wait()
        await until(lambda: setup.router.metrics.decode_only == 1)
        await well(turn)

    async with running(prefill=1, decode=1) as setup:
        setup.engines["p0"].script.append(fail)
        setup.engines["d0"].script.append(decode)
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "d0"
        assert len(setup.engines["d0"].seen) == 1


async def _not_there(setup: Setup) -> None:
    await setup.engines["p0"].stop()


async def _there(setup: Setup) -> None:
    pass


@pytest.mark.parametrize(
    ("prepare", "behave"),
    [(_not_there, well), (_there, dies), (_there, fails(503)), (_there, fails(429))],
    ids=["unreachable", "killed", "503", "429"],
)
def test_a_prefill_that_never_ran_is_not_waited_for(prepare: object, behave: Behaviour) -> None:
    """Nobody would tell the store that its keys never come: the decode engine is asked again without them."""

    @async_test
    async def check() -> None:
        async with running(prefill=1, decode=2) as setup:
            await prepare(setup)  # type: ignore[operator]
            setup.engines["p0"].default = behave

            async def waits_for_layers(turn: Turn) -> None:
                await (hangs if "kv_transfer_params" in turn.seen.body else well)(turn)

            for name in ("d0", "d1"):
                setup.engines[name].default = waits_for_layers
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == 200
            served = setup.engines[answer.json["served_by"]]
            # The same instance, whose local prefix cache it was chosen for.
            *waited, plain = served.seen
            assert plain.body == PROMPT
            assert all(seen.transfer["role"] == "decode" for seen in waited) and len(waited) <= 1
            await until(lambda: served.num_abandoned == len(waited))
            assert setup.router.metrics.decode_only == 1
            if behave is well:
                await setup.engines["p0"].start()

    check()


@async_test
async def test_without_any_healthy_prefill_engine_requests_are_still_served() -> None:
    health = {"interval_ms": 10, "startup_interval_ms": 10, "failure_threshold": 1}
    async with running(prefill=1, decode=1, health=health) as setup:
        setup.engines["p0"].healthy = False
        sick = setup.router.cluster.instances[setup.engines["p0"].url]
        await until(lambda: sick.health.value == "down" and setup.router.cluster.is_ready())
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.json["served_by"] == "d0"
        assert setup.engines["p0"].seen == []
        assert "kv_transfer_params" not in setup.engines["d0"].seen[0].body


@pytest.mark.parametrize(
    "failure", [fails(500), fails(503), fails(429), dies], ids=["500", "503", "429", "dies"]
)
def test_a_decode_engine_that_fails_is_replaced_and_the_prefill_kept(failure: Behaviour) -> None:
    @async_test
    async def check() -> None:
        async with running(prefill=1, decode=2) as setup:
            setup.engines["d0"].default = failure
            answer = await setup.ask(COMPLETIONS, STREAM)
            assert answer.events[-1] == "[DONE]"
            await until(lambda: setup.in_flight == 0)
            (prefill,), (first,), (second,) = (setup.engines[n].seen for n in ("p0", "d0", "d1"))
            assert prefill.transfer["transfer_id"] == second.transfer["transfer_id"]
            assert first.raw_body == second.raw_body

    check()


@async_test
async def test_when_every_decode_engine_is_busy_the_client_is_told_when_to_come_again() -> None:
    async with running(prefill=1, decode=2) as setup:
        for name in ("d0", "d1"):
            setup.engines[name].default = fails(429, "retry-after: 3\r\n")
        setup.engines["p0"].default = hangs
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert (answer.status, answer.headers["retry-after"]) == (429, "3")
        await until(lambda: setup.engines["p0"].num_abandoned == 1)
        assert len(setup.engines["p0"].seen) == 1


@async_test
async def test_a_client_that_leaves_closes_both_legs() -> None:
    async with running(prefill=1, decode=1) as setup:
        for engine in setup.engines.values():
            engine.default = hangs
        client = await setup.client()
        await client.send(COMPLETIONS, STREAM)
        await until(lambda: all(engine.seen for engine in setup.engines.values()))
        client.close()
        await until(lambda: all(engine.num_abandoned == 1 for engine in setup.engines.values()))


@async_test
async def test_a_decode_engine_that_dies_in_mid_stream_gives_an_error_event_and_frees_the_prefill() -> None:
    async def die_after_one(turn: Turn) -> None:
        await turn.begin_stream()
        await turn.event("{}")
        await asyncio.sleep(0.05)
        turn.cut()

    async with running(prefill=1, decode=1) as setup:
        setup.engines["p0"].script.append(hangs)
        setup.engines["d0"].script.append(die_after_one)
        answer = await setup.ask(COMPLETIONS, STREAM)
        assert [json.loads(event).get("error", {}).get("code") for event in answer.events] == [None, 502]
        await until(lambda: setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_a_request_that_takes_too_long_ends_on_both_engines() -> None:
    async with running(prefill=1, decode=1, request_timeout_ms=500) as setup:
        for engine in setup.engines.values():
            engine.default = hangs
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 504
        await until(lambda: all(engine.num_abandoned == 1 for engine in setup.engines.values()))


@async_test
async def test_other_paths_go_to_a_decode_engine() -> None:
    async with running(prefill=1, decode=1) as setup:
        assert (await setup.ask("/v1/models")).json["served_by"] == "d0"
        assert (await setup.ask("/v1/embeddings", {"input": "x"})).json["served_by"] == "d0"
        assert setup.engines["p0"].seen == []


@async_test
async def test_a_storm_of_leaving_clients_and_failing_engines_leaves_nothing_behind() -> None:
    async with running(prefill=2, decode=2, breaker={"enabled": False}) as setup:
        behaviours = [well, fails(500), dies, hangs, fails(429), well]
        for i, engine in enumerate(setup.engines.values()):
            for n in range(60):
                engine.script.append(behaviours[(n * (i + 1) + n // 6) % len(behaviours)])

        async def one(i: int) -> None:
            client = await setup.client()
            await client.send(COMPLETIONS, STREAM if i % 2 else PROMPT)
            if i % 3:
                await asyncio.wait((asyncio.ensure_future(client.reader.read(1)),), timeout=0.02)
            else:
                await asyncio.sleep(0)
            client.writer.transport.abort()

        for start in range(0, 80, 16):
            await asyncio.gather(*(one(i) for i in range(start, start + 16)))
        await until(lambda: setup.in_flight == 0)
        for engine in setup.engines.values():
            engine.script.clear()
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
