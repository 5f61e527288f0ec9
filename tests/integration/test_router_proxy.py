"""In front of engines that each do everything: what passes, what is answered here, what is refused."""

import asyncio
import gc
import json
import socket

import pytest

from router.protocols.base import Exchange
from tests.integration.router_harness import Turn, async_test, fails, hangs, running, until, well

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}


@async_test
async def test_an_answer_passes_byte_for_byte() -> None:
    odd = b'{"choices":[{"text":"\\u00e9 \\/ 1.0e2"}] , "new_field": 1.50}'

    async def behave(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 Fine\r\nX-Odd:  a \r\nContent-Length: %d\r\n\r\n%b" % (len(odd), odd))

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(behave)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert (answer.status, answer.body, answer.headers["x-odd"]) == (200, odd, "a")


@async_test
async def test_the_request_reaches_the_engine_untouched() -> None:
    body = b'{"model": "m",  "prompt":"\\u00e9", "cache_salt": "s", "priority": 2, "unknown": [1.50, null]}'
    headers = "Authorization: Bearer k\r\nTraceParent: 00-ab-cd-01\r\nX-Whatever: 7\r\nTE: trailers\r\n"
    async with running(mixed=1) as setup:
        await setup.ask(COMPLETIONS + "?a=b%20c", body, headers + "X-Request-Id: mine\r\n")
        seen = setup.engines["m0"].seen[0]
        assert seen.raw_body == body
        assert seen.path == COMPLETIONS + "?a=b%20c"
        assert seen.headers["authorization"] == "Bearer k"
        assert seen.headers["traceparent"] == "00-ab-cd-01"
        assert seen.headers["x-whatever"] == "7"
        assert seen.headers["x-request-id"] == "mine"
        assert seen.headers["host"] == setup.engines["m0"].url.removeprefix("http://")
        assert "te" not in seen.headers


@async_test
async def test_request_ids_are_made_kept_and_told_to_the_client() -> None:
    async with running(mixed=1) as setup:
        made = await setup.ask(COMPLETIONS, PROMPT)
        kept = await setup.ask(COMPLETIONS, PROMPT, "x-request-id: mine\r\n")
        seen = setup.engines["m0"].seen
        assert made.headers["x-request-id"] == seen[0].headers["x-request-id"] != ""
        assert kept.headers["x-request-id"] == "mine"


@async_test
async def test_an_id_line_of_the_engine_is_not_doubled() -> None:
    async def behave(turn: Turn) -> None:
        await turn.answer(200, {}, "X-Request-Id: engine\r\n")

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(behave)
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        raw = await client.reader.readuntil(b"\r\n\r\n")
        assert raw.lower().count(b"x-request-id") == 1


@async_test
async def test_a_stream_arrives_event_by_event() -> None:
    go_on = asyncio.Event()

    async def behave(turn: Turn) -> None:
        await turn.begin_stream()
        await turn.event("first")
        await go_on.wait()
        await turn.end_stream()

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(behave)
        client = await setup.client()
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        status, headers = await client.head()
        chunks = client.chunks()
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert await anext(chunks) == b"data: first\n\n"
        go_on.set()
        assert [chunk async for chunk in chunks] == [b"data: [DONE]\n\n"]


@async_test
async def test_requests_go_round_and_connections_are_kept() -> None:
    async with running(mixed=2) as setup:
        client = await setup.client()
        served = [(await client.ask("/v1/chat/completions", PROMPT)).json["served_by"] for _ in range(6)]
        assert served == ["m0", "m1"] * 3
        # One connection for the health probes and the requests, whoever came first, or one each.
        assert all(engine.num_connections <= 2 for engine in setup.engines.values())


@async_test
async def test_least_loaded_avoids_the_busy_engine() -> None:
    async with running(mixed=2, policy="least_loaded") as setup:
        for engine in setup.engines.values():
            engine.script.append(hangs)
        waiting = await setup.client()
        await waiting.send(COMPLETIONS, PROMPT)
        await until(lambda: any(engine.seen for engine in setup.engines.values()))
        busy = next(name for name, engine in setup.engines.items() if engine.seen)
        free = ({"m0", "m1"} - {busy}).pop()
        setup.engines[free].script.clear()
        served = {(await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] for _ in range(4)}
        assert served == {free}


@async_test
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        for i in range(50):
            await client.send(
                COMPLETIONS if i % 2 else "/health", PROMPT if i % 2 else None, f"x-request-id: {i}\r\n"
            )
        answers = [await client.answer() for _ in range(50)]
        assert [a.status for a in answers] == [200] * 50
        assert [a.headers.get("x-request-id") for a in answers[1::2]] == [str(i) for i in range(1, 50, 2)]
        assert [s.headers["x-request-id"] for s in setup.engines["m0"].seen] == [
            str(i) for i in range(1, 50, 2)
        ]


@async_test
async def test_a_chunked_request_body_reaches_the_engine_whole() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        raw = json.dumps(PROMPT).encode()
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(0, len(raw), 7):
            piece = raw[at : at + 7]
            client.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await asyncio.sleep(0)
        client.writer.write(b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.answer()).status == 200
        seen = setup.engines["m0"].seen[0]
        assert seen.raw_body == raw and "transfer-encoding" not in seen.headers


@async_test
async def test_a_client_that_expects_100_continue_gets_it_before_its_body() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        raw = json.dumps(PROMPT).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: r\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
        )
        client.writer.write(head % len(raw))
        assert (await client.head())[0] == 100
        client.writer.write(raw)
        assert (await client.answer()).status == 200
        assert "expect" not in setup.engines["m0"].seen[0].headers


@async_test
async def test_an_http2_upgrade_offer_is_declined_and_the_body_survives() -> None:
    async with running(mixed=1) as setup:
        offer = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
        client = await setup.client()
        assert (await client.ask(COMPLETIONS, PROMPT, offer)).status == 200
        assert (await client.ask(COMPLETIONS, PROMPT)).status == 200
        first = setup.engines["m0"].seen[0]
        assert first.body == PROMPT and "upgrade" not in first.headers


@async_test
async def test_http_1_0_gets_a_body_without_chunks_and_a_closed_connection() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        raw = json.dumps({**PROMPT, "stream": True, "max_tokens": 2}).encode()
        client.writer.write(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(raw), raw)
        )
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers and answer.headers["connection"] == "close"
        assert answer.events[-1] == "[DONE]" and len(answer.events) == 3


@async_test
async def test_connection_close_is_honoured() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        answer = await client.ask(COMPLETIONS, PROMPT, "connection: close\r\n")
        assert answer.headers["connection"] == "close"
        assert await client.closed_by_router() == b""


@async_test
async def test_an_engine_that_closes_its_connection_closes_only_its_own() -> None:
    async def behave(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        turn.cut_gently()

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(behave)
        assert (await setup.ask(COMPLETIONS, PROMPT)).body == b"until the end"
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200


@async_test
async def test_models_and_other_v1_paths_pass_to_one_engine() -> None:
    async with running(mixed=1) as setup:
        assert (await setup.ask("/v1/models")).json["served_by"] == "m0"
        assert (await setup.ask("/v1/embeddings", {"input": "x"})).json["served_by"] == "m0"
        assert (await setup.ask("/tokenize", {"prompt": "x"})).json["served_by"] == "m0"
        assert [s.path for s in setup.engines["m0"].seen] == ["/v1/models", "/v1/embeddings", "/tokenize"]


@async_test
async def test_errors_of_our_own_have_openais_shape() -> None:
    async with running(mixed=1, api_keys=["right"]) as setup:
        client = await setup.client()
        key = "authorization: Bearer right\r\n"
        for status, answer in [
            (404, await client.ask("/nothing")),
            (404, await client.ask("/sleep", {})),
            (405, await client.ask("/health", {})),
            (401, await client.ask(COMPLETIONS, PROMPT)),
            (401, await client.ask(COMPLETIONS, PROMPT, "authorization: Bearer wrong\r\n")),
            (405, await client.ask(COMPLETIONS, None, key)),
            (400, await client.ask(COMPLETIONS, b"{", key)),
            (400, await client.ask(COMPLETIONS, b"[1]", key)),
            (400, await client.ask(COMPLETIONS, PROMPT, key + "x-slo-ttft-ms: soon\r\n")),
        ]:
            assert answer.status == status
            assert answer.json["error"]["message"] and answer.json["error"]["code"] == status
        assert setup.engines["m0"].seen == []
        assert (await client.ask(COMPLETIONS, PROMPT, key)).status == 200
        assert setup.engines["m0"].seen[0].headers["authorization"] == "Bearer right"


@async_test
async def test_health_ready_and_metrics() -> None:
    async with running(mixed=2) as setup:
        client = await setup.client()
        assert (await client.ask("/health")).status == 200
        assert (await client.ask("/health", method="HEAD", body=None)).status == 200
        await until(setup.router.cluster.is_ready)
        ready = await client.ask("/ready")
        assert ready.status == 200 and ready.json["ready"] is True
        assert set(ready.json["instances"]) == {engine.url for engine in setup.engines.values()}
        await client.ask(COMPLETIONS, PROMPT)
        text = (await client.ask("/metrics")).body.decode()
        assert 'mooncake_router_requests_total{path="/v1/completions",status="200"} 1.0' in text
        assert 'mooncake_router_legs_total{outcome="2xx",role="mixed"} 1.0' in text
        assert "mooncake_router_first_byte_seconds_count 1.0" in text
        assert "mooncake_router_active_requests 0.0" in text


@async_test
async def test_unknown_paths_make_no_time_series() -> None:
    async with running(mixed=1) as setup:
        for i in range(20):
            await setup.ask(f"/v1/made/up/{i}", {})
        assert set(setup.router.metrics.requests) == {("other", 200)}


@async_test
async def test_too_many_requests_at_once_are_told_to_come_again() -> None:
    async with running(mixed=1, max_concurrent_requests=1) as setup:
        setup.engines["m0"].script.append(hangs)
        waiting = await setup.client()
        await waiting.send(COMPLETIONS, PROMPT)
        await until(lambda: setup.in_flight == 1)
        answer = await setup.ask(COMPLETIONS, PROMPT)
        assert answer.status == 429 and answer.headers["retry-after"] == "1"


@async_test
async def test_sockets_are_tuned_on_both_sides() -> None:
    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(hangs)
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: setup.in_flight == 1 and len(setup.engines["m0"].seen) == 1)
        (instance,) = setup.router.cluster.instances.values()
        transports = [c.transport for c in setup.router._connections]
        transports += [c.transport for c in instance.pool._open]
        for transport in transports:
            sock = transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@async_test
async def test_a_large_body_and_a_large_answer_pass() -> None:
    async with running(mixed=1) as setup:
        prompt = "x" * (8 << 20)

        async def echo(turn: Turn) -> None:
            await turn.answer(200, {"prompt": turn.seen.body["prompt"]})

        setup.engines["m0"].script.append(echo)
        answer = await setup.ask(COMPLETIONS, {"model": "m", "prompt": prompt})
        assert answer.json["prompt"] == prompt


@async_test
async def test_a_slow_client_slows_the_engine_and_loses_nothing() -> None:
    num_events, size, sent = 3000, 8000, 0

    async def flood(turn: Turn) -> None:
        nonlocal sent
        await turn.begin_stream()
        for i in range(num_events):
            await turn.event(f"{i:06d}" + "x" * size)
            sent += 1
        await turn.end_stream()

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(flood)
        client = await setup.client()
        client.reader._limit = 1024  # asyncio then stops reading soon, and the kernel's buffers fill
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        (instance,) = setup.router.cluster.instances.values()
        await until(lambda: any(c._paused for c in instance.pool._open))
        stopped_at = sent
        assert stopped_at < num_events
        client.reader._limit = 1 << 20
        answer = await client.answer()
        assert [event[:6] for event in answer.events] == [f"{i:06d}" for i in range(num_events)] + ["[DONE]"]
        # The engine's connection must not stay paused for whoever uses it next.
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200


@async_test
async def test_an_engine_connection_closed_while_idle_is_replaced_unnoticed() -> None:
    async def answer_then_close(turn: Turn) -> None:
        await well(turn)
        turn.cut_gently()

    async with running(mixed=1, retry={"max_retries": 0}) as setup:
        for _ in range(5):
            setup.engines["m0"].script.append(answer_then_close)
        client = await setup.client()
        for _ in range(10):
            assert (await client.ask(COMPLETIONS, PROMPT)).status == 200


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_clients_mistake_is_the_engines_to_answer(status: int) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=2) as setup:
            for engine in setup.engines.values():
                engine.default = fails(status)
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == status and "says" in answer.json["error"]["message"]
            assert sum(len(engine.seen) for engine in setup.engines.values()) == 1
            assert all(i.breaker.is_closed for i in setup.router.cluster.instances.values())

    check()


@async_test
async def test_nothing_of_a_request_is_left_for_the_garbage_collector() -> None:
    """Bodies may be large: they go with their request, not with some later collection."""
    async with running(mixed=1) as setup:
        gc.collect()
        gc.disable()
        try:
            for body in (PROMPT, {**PROMPT, "stream": True}):
                assert (await setup.ask(COMPLETIONS, body)).status == 200
            await until(lambda: not [one for one in gc.get_objects() if type(one) is Exchange])
        finally:
            gc.enable()
