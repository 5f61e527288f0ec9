"""What one client may not do to the others: sizes, slowness, too many of them; and leaving in good order."""

import asyncio

import pytest

from tests.integration.router_harness import Turn, async_test, hangs, running, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nx: a\r\n b\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nexpect: a miracle\r\ncontent-length: 3\r\n\r\n", 417),
        (b"CONNECT elsewhere:443 HTTP/1.1\r\nhost: elsewhere\r\n\r\n", 405),
        (b"GET nowhere HTTP/1.1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5000\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n800\r\n" + b"x" * 2048, 413),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nx: " + b"y" * 3000, 431),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_connection_closed(sent: bytes, status: int) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=1, http={"max_header_bytes": 2000, "max_body_bytes": 1000}) as setup:
            client = await setup.client()
            client.writer.write(sent)
            answer = await client.answer()
            assert answer.status == status and answer.headers["connection"] == "close"
            assert answer.json["error"]["message"]
            assert await client.closed_by_router() == b""
            assert setup.engines["m0"].seen == []
            assert setup.router.metrics.refusals[status] == 1

    check()


@async_test
async def test_a_refusal_waits_for_the_answers_before_it() -> None:
    go_on = asyncio.Event()

    async def later(turn: Turn) -> None:
        await go_on.wait()
        await turn.answer(200, {})

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(later)
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        client.writer.write(b"NONSENSE\r\n\r\n")
        await until(lambda: setup.router.metrics.refusals[400] == 1)
        go_on.set()
        assert [(await client.answer()).status for _ in range(2)] == [200, 400]


@async_test
async def test_a_body_over_the_limit_is_answered_while_the_client_still_sends() -> None:
    async with running(mixed=1, http={"max_body_bytes": 1000}) as setup:
        client = await setup.client()
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 4000000\r\n\r\n")
        for _ in range(4000):
            client.writer.write(b"x" * 1000)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    "sent",
    [b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9000\r\n\r\nabc"],
    ids=["head", "body"],
)
def test_a_slow_request_is_a_408(sent: bytes) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=1, http={"header_timeout_ms": 50, "body_grace_ms": 50}) as setup:
            client = await setup.client()
            client.writer.write(sent)
            assert (await client.answer()).status == 408

    check()


@async_test
async def test_a_connection_on_which_nothing_comes_is_closed_and_is_no_request() -> None:
    async with running(mixed=1, http={"header_timeout_ms": 50}) as setup:
        spare = await setup.client()
        assert await spare.closed_by_router() == b""
        assert not setup.router.metrics.refusals


@async_test
async def test_a_body_that_drips_is_cut_though_it_never_stops() -> None:
    async with running(mixed=1, http={"body_grace_ms": 50, "min_body_bytes": 100_000}) as setup:
        client = await setup.client()
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 90000\r\n\r\n")
        drip = asyncio.get_running_loop().create_task(drip_forever(client.writer))
        assert (await client.answer()).status == 408
        drip.cancel()
        await asyncio.gather(drip, return_exceptions=True)


async def drip_forever(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"x")
        await asyncio.sleep(0.01)


@async_test
async def test_an_idle_connection_is_closed_a_waiting_one_is_not() -> None:
    async with running(mixed=1, http={"idle_timeout_ms": 500, "header_timeout_ms": 500}) as setup:
        setup.engines["m0"].script.append(hangs)
        idle, waiting = await setup.client(), await setup.client()
        await waiting.send(COMPLETIONS, PROMPT)
        await idle.ask("/health")
        assert await idle.closed_by_router() == b""
        assert setup.in_flight == 1


@async_test
async def test_a_client_that_stops_reading_is_cut_in_the_end() -> None:
    async def flood(turn: Turn) -> None:
        await turn.begin_stream()
        while True:
            await turn.event("x" * 60_000)

    async with running(mixed=1, http={"stall_timeout_ms": 200}) as setup:
        setup.engines["m0"].script.append(flood)
        client = await setup.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        await until(lambda: setup.in_flight == 1)
        await until(lambda: setup.in_flight == 0)
        assert setup.router.metrics.clients_gone == 1


@async_test
async def test_one_connection_too_many_is_told_so() -> None:
    async with running(mixed=1, http={"max_connections": 1}) as setup:
        first = await setup.client()
        assert (await first.ask("/health")).status == 200
        assert (await (await setup.client()).answer()).status == 503
        assert (await first.ask("/health")).status == 200


@async_test
async def test_a_pipelining_client_is_read_no_further_than_its_limit() -> None:
    async with running(mixed=1, http={"max_pipelined": 4}) as setup:
        go_on = asyncio.Event()

        async def later(turn: Turn) -> None:
            await go_on.wait()
            await turn.answer(200, {})

        setup.engines["m0"].script.append(later)
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["m0"].seen) == 1)
        for _ in range(200):
            await client.send(COMPLETIONS, {**PROMPT, "prompt": "x" * 20_000})
            await asyncio.sleep(0)
        (connection,) = setup.router._connections
        await until(lambda: connection._reading_paused)
        assert len(connection._queue) < 100
        go_on.set()
        assert [(await client.answer()).status for _ in range(201)] == [200] * 201


@async_test
async def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    go_on = asyncio.Event()

    async def later(turn: Turn) -> None:
        await go_on.wait()
        await turn.answer(200, {})

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(later)
        busy, idle, second = await setup.client(), await setup.client(), await setup.client()
        await idle.ask("/health")
        await second.ask("/health")
        await busy.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["m0"].seen) == 1)
        draining = asyncio.get_running_loop().create_task(setup.router.drain())
        assert await idle.closed_by_router() == b""
        with pytest.raises(OSError):
            await setup.client()
        go_on.set()
        answer = await busy.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        await draining


@async_test
async def test_a_drain_ends_at_its_timeout() -> None:
    async with running(mixed=1, drain_timeout_ms=50) as setup:
        setup.engines["m0"].script.append(hangs)
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["m0"].seen) == 1)
        await setup.router.drain()
        await setup.router.stop()
        assert await client.closed_by_router() == b""
        await until(lambda: setup.engines["m0"].num_abandoned == 1)
