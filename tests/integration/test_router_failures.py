"""Engines that fail and clients that leave, without P/D: retries, the breaker, health, honest ends."""

import asyncio
import json
import socket

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
)

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}
STREAM = {**PROMPT, "stream": True}


@pytest.mark.parametrize(
    "failure", [fails(500), fails(503), fails(429), dies], ids=["500", "503", "429", "dies"]
)
def test_a_failure_before_the_first_byte_is_tried_elsewhere(failure: object) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=3) as setup:
            for name in ("m0", "m1"):
                setup.engines[name].default = failure  # type: ignore[assignment]
            for _ in range(3):
                answer = await setup.ask(COMPLETIONS, PROMPT)
                assert (answer.status, answer.json["served_by"]) == (200, "m2")

    check()


@async_test
async def test_the_last_engines_answer_is_passed_with_its_retry_after() -> None:
    async with running(mixed=2) as setup:
        for engine in setup.engines.values():
            engine.default = fails(429, "retry-after: 7\r\n")
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert "says 429" in answer.json["error"]["message"]
        assert [len(engine.seen) for engine in setup.engines.values()] == [1, 1]
        assert all(
            i.breaker.is_closed and not i.breaker._failures for i in setup.router.cluster.instances.values()
        )


@async_test
async def test_a_retry_after_survives_a_later_lost_engine() -> None:
    async with running(mixed=2) as setup:
        setup.engines["m0"].default = fails(429, "retry-after: 7\r\n")
        setup.engines["m1"].default = dies
        answers = [await setup.ask(COMPLETIONS, PROMPT) for _ in range(2)]
        assert sorted(a.status for a in answers) == [429, 502]
        assert [a.headers["retry-after"] for a in answers] == ["7", "7"]


@async_test
async def test_an_engine_that_is_not_there_is_a_502_that_names_it() -> None:
    async with running(mixed=1) as setup:
        await setup.engines["m0"].stop()
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.status == 502
        assert setup.engines["m0"].url in answer.json["error"]["message"]
        await setup.engines["m0"].start()
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200


@async_test
async def test_retries_can_be_turned_off_and_are_bounded_by_their_budget() -> None:
    async def late(turn: Turn) -> None:
        await asyncio.sleep(0.05)
        await fails(500)(turn)

    for retry in ({"max_retries": 0}, {"budget_ms": 10}):
        async with running(mixed=2, retry=retry) as setup:
            for engine in setup.engines.values():
                engine.default = late
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 500
            assert sum(len(engine.seen) for engine in setup.engines.values()) == 1


@async_test
async def test_an_engine_that_dies_in_mid_stream_gives_an_error_event_and_no_done() -> None:
    async def die_after_two(turn: Turn) -> None:
        await turn.begin_stream()
        await turn.event('{"n": 1}')
        await turn.event('{"n": 2}')
        await asyncio.sleep(0.05)
        turn.cut()

    async with running(mixed=2) as setup:
        for engine in setup.engines.values():
            engine.script.append(die_after_two)
        client = await setup.client()
        answer = await client.ask(COMPLETIONS, STREAM)
        assert answer.events[:2] == ['{"n": 1}', '{"n": 2}']
        assert json.loads(answer.events[2])["error"]["code"] == 502
        assert len(answer.events) == 3
        assert await client.closed_by_router() == b""
        assert sum(len(engine.seen) for engine in setup.engines.values()) == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata:",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        b"transfer-encoding: chunked\r\n\r\n2\r\n\n\n\r\n",
    ],
    ids=["content-length", "mid-chunk", "compressed"],
)
def test_what_cannot_be_completed_is_cut_not_ended(sent: bytes) -> None:
    @async_test
    async def check() -> None:
        async def half(turn: Turn) -> None:
            await turn.send(sent)
            await asyncio.sleep(0.05)
            turn.cut()

        async with running(mixed=1) as setup:
            setup.engines["m0"].script.append(half)
            client = await setup.client()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await client.ask(COMPLETIONS, STREAM)

    check()


@pytest.mark.parametrize(
    "garbage",
    [b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"HTTP/1.1 101 Switch\r\n\r\n"],
)
def test_garbage_from_an_engine_is_a_502(garbage: bytes) -> None:
    @async_test
    async def check() -> None:
        async def babble(turn: Turn) -> None:
            await turn.send(garbage)
            await asyncio.sleep(0.05)
            turn.cut()

        async with running(mixed=1) as setup:
            setup.engines["m0"].script.append(babble)
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 502

    check()


@async_test
async def test_two_responses_to_one_request_never_reach_the_next_client() -> None:
    async def twice(turn: Turn) -> None:
        await turn.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2"
        )

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(twice)
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 502
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "m0"


@async_test
async def test_interim_responses_are_not_passed_on() -> None:
    async def early_hints(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n")
        await turn.answer(200, {"fine": True})

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(early_hints)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert (answer.status, answer.json) == (200, {"fine": True})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_takes_its_engine_request_along(streaming: bool) -> None:
    @async_test
    async def check() -> None:
        async def slow(turn: Turn) -> None:
            if streaming:
                await turn.begin_stream()
                await turn.event("one")
            await turn.gone()

        async with running(mixed=1) as setup:
            engine = setup.engines["m0"]
            engine.script.append(slow)
            client = await setup.client()
            await client.send(COMPLETIONS, STREAM)
            await until(lambda: len(engine.seen) == 1)
            if streaming:
                await client.head()
            client.close()
            await until(lambda: engine.num_abandoned == 1)
            await until(lambda: setup.router.metrics.clients_gone == 1)
            assert setup.router.metrics.requests[COMPLETIONS, 499] == 1

    check()


@async_test
async def test_a_client_that_leaves_while_the_router_connects_leaves_no_trace() -> None:
    # A full backlog: connecting neither succeeds nor fails.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        async with running(mixed=1) as setup:
            (instance,) = setup.router.cluster.instances.values()
            instance.pool.port = full.getsockname()[1]
            client = await setup.client()
            await client.send(COMPLETIONS, PROMPT)
            await until(lambda: setup.in_flight == 1)
            client.close()
            await until(lambda: setup.in_flight == 0)


@async_test
async def test_an_engine_that_cannot_be_reached_in_time_is_a_502() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first:
        first.connect(full.getsockname())
        async with running(mixed=1, connect_timeout_ms=100) as setup:
            (instance,) = setup.router.cluster.instances.values()
            instance.pool.port = full.getsockname()[1]
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == 502 and "0.1 s" in answer.json["error"]["message"]


@async_test
async def test_a_request_that_takes_too_long_is_a_504_and_ends_at_the_engine() -> None:
    async with running(mixed=1, request_timeout_ms=500) as setup:
        setup.engines["m0"].script.append(hangs)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.status == 504 and "0.5 s" in answer.json["error"]["message"]
        await until(lambda: setup.engines["m0"].num_abandoned == 1)


@async_test
async def test_a_stream_that_takes_too_long_ends_with_an_error_event() -> None:
    async def endless(turn: Turn) -> None:
        await turn.begin_stream()
        await turn.event("{}")
        await turn.gone()

    async with running(mixed=1, request_timeout_ms=500) as setup:
        setup.engines["m0"].script.append(endless)
        answer = await setup.ask(COMPLETIONS, STREAM)
        assert json.loads(answer.events[-1])["error"]["code"] == 502
        await until(lambda: setup.engines["m0"].num_abandoned == 1)


@async_test
async def test_the_breaker_opens_on_failures_and_lets_one_request_try_later() -> None:
    breaker = {"failure_threshold": 3, "success_threshold": 1, "open_ms": 1000}
    async with running(mixed=1, breaker=breaker) as setup:
        engine = setup.engines["m0"]
        engine.default = fails(500)
        assert [(await setup.ask(COMPLETIONS, PROMPT)).status for _ in range(4)] == [500, 500, 500, 503]
        assert len(engine.seen) == 3
        (instance,) = setup.router.cluster.instances.values()
        engine.script.append(fails(500))
        loop = asyncio.get_running_loop()
        await until(lambda: instance.breaker.admits(loop.time(), 0))
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 500
        assert not instance.breaker.admits(loop.time(), 0)
        engine.default = MockEngine("").default
        await until(lambda: instance.breaker.admits(loop.time(), 0))
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert instance.breaker.is_closed


@async_test
async def test_health_probes_take_an_engine_out_and_bring_it_back() -> None:
    health = {"interval_ms": 10, "startup_interval_ms": 10, "failure_threshold": 2, "success_threshold": 2}
    async with running(mixed=2, health=health) as setup:
        await until(setup.router.cluster.is_ready)
        sick = setup.router.cluster.instances[setup.engines["m0"].url]
        setup.engines["m0"].healthy = False
        await until(lambda: sick.health.value == "down")
        served = {(await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] for _ in range(4)}
        assert served == {"m1"}
        ready = (await setup.ask("/ready")).json
        assert ready["ready"] and ready["instances"][sick.url]["detail"] == "status 500"
        await setup.engines["m1"].stop()
        await until(lambda: not setup.router.cluster.is_ready())
        unready = await setup.ask("/ready")
        assert unready.status == 503
        refused = await setup.ask(COMPLETIONS, PROMPT)
        assert refused.status == 503 and refused.json["error"]["code"] == "no_instance"
        setup.engines["m0"].healthy = True
        await until(lambda: sick.health.value == "up")
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "m0"


@async_test
async def test_a_bug_of_ours_costs_one_request() -> None:
    async with running(mixed=1) as setup:
        scheduler = setup.router.scheduler
        setup.router.scheduler = None  # type: ignore[assignment]
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 500
        setup.router.scheduler = scheduler
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
