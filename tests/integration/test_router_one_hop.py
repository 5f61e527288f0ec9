"""What concerns one connection only, the router's own with a client or with an engine, goes no further."""

import json

import pytest

from tests.integration.router_harness import Turn, async_test, running, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}
BODY = json.dumps(PROMPT).encode()
HEAD_AND_LENGTH = "POST {path} HTTP/1.1\r\nhost: r\r\ncontent-length: {length}\r\n{lines}\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        "Connection: X-Mine, keep-alive\r\n",
        "Connection: keep-alive\r\nconnection:x-mine\r\n",
        "connection: x-mine\r\nConnection: keep-alive\r\n",
        "Connection: upgrade , x-mine\r\nUpgrade: h2c\r\n",
    ],
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_fields_a_client_names_in_connection_reach_no_engine(lines: str, pieces: int) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=1) as setup:
            client = await setup.client()
            lines_of_others = (
                "x-other: 1\r\nkeep-alive: timeout=5\r\nproxy-connection: keep-alive\r\nte: trailers\r\n"
            )
            named = f"x-MINE: secret\r\n{lines}{lines_of_others}"
            for _ in range(2):  # the second is known already
                head = HEAD_AND_LENGTH.format(path=COMPLETIONS, length=len(BODY), lines=named).encode()
                client.writer.write(head[: -10 * (pieces - 1) or None])
                await client.writer.drain()
                client.writer.write((head[-10:] if pieces == 2 else b"") + BODY)
                assert (await client.answer()).status == 200
            for seen in setup.engines["m0"].seen:
                one_hop = {"connection", "keep-alive", "proxy-connection", "te", "upgrade", "x-mine"}
                assert not one_hop & seen.headers.keys()
                assert seen.headers["x-other"] == "1" and seen.body == PROMPT

    check()


@async_test
async def test_what_says_where_a_body_ends_is_dropped_by_no_name() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        answer = await client.ask(COMPLETIONS, PROMPT, "connection: content-length, host\r\n")
        seen = setup.engines["m0"].seen[0]
        assert answer.status == 200 and seen.body == PROMPT and "host" in seen.headers

        async def names_it(turn: Turn) -> None:
            await turn.answer(200, {"a": 1}, "connection: content-length\r\n")

        setup.engines["m0"].script.append(names_it)
        assert (await client.ask(COMPLETIONS, PROMPT)).json == {"a": 1}


@async_test
async def test_close_beside_an_upgrade_closes() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT, "connection: upgrade, close\r\nupgrade: h2c\r\n")
        assert (await client.answer()).status == 200
        assert await client.closed_by_router() == b""


@pytest.mark.parametrize("streams", [False, True])
def test_fields_an_engine_names_in_connection_reach_no_client(streams: bool) -> None:
    lines = (
        "Connection: X-Mine, keep-alive\r\nKeep-Alive: timeout=5\r\nX-mine: secret\r\nproxy-connection: x\r\n"
        "Upgrade: h2c\r\nX-Other: 1\r\n"
    )

    async def says_too_much(turn: Turn) -> None:
        if not streams:
            await turn.answer(200, {"a": "b"}, lines)
            return
        await turn.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            + lines.encode()
            + b"transfer-encoding: chunked\r\n\r\n"
        )
        await turn.event("one")
        await turn.end_stream()

    @async_test
    async def check() -> None:
        async with running(mixed=1) as setup:
            client = await setup.client()
            setup.engines["m0"].script.append(says_too_much)
            answer = await client.ask(COMPLETIONS, {**PROMPT, "stream": streams})
            assert answer.status == 200
            one_hop = {"connection", "keep-alive", "proxy-connection", "upgrade", "x-mine"}
            assert not one_hop & answer.headers.keys()
            assert answer.headers["x-other"] == "1" and "x-request-id" in answer.headers
            assert answer.events == ["one", "[DONE]"] if streams else answer.json == {"a": "b"}
            # Neither connection was harmed.
            assert (await client.ask(COMPLETIONS, PROMPT)).status == 200
            assert len(setup.engines["m0"].seen) == 2 and setup.engines["m0"].num_connections == 2

    check()


@async_test
async def test_an_engine_that_closes_and_names_a_field_is_still_said_to_close() -> None:
    async def last_one(turn: Turn) -> None:
        await turn.answer(200, {"a": 1}, "connection: close, x-mine\r\nx-mine: 1\r\n")
        turn.cut_gently()

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(last_one)
        client = await setup.client()
        answer = await client.ask(COMPLETIONS, PROMPT)
        assert answer.headers["connection"] == "close" and "x-mine" not in answer.headers
        assert await client.closed_by_router() == b""


@async_test
async def test_a_client_of_http_1_0_gets_no_field_that_an_engine_names() -> None:
    async def names_one(turn: Turn) -> None:
        await turn.answer(200, {"a": 1}, "connection: x-mine\r\nx-mine: 1\r\nkeep-alive: timeout=5\r\n")

    async with running(mixed=1) as setup:
        setup.engines["m0"].script.append(names_one)
        client = await setup.client()
        client.writer.write(
            b"POST %b HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (COMPLETIONS.encode(), len(BODY), BODY)
        )
        answer = await client.answer()
        assert answer.json == {"a": 1} and not {"x-mine", "keep-alive"} & answer.headers.keys()
        assert answer.headers["connection"] == "close"


REFUSED_BY_HEAD = [
    ("POST", COMPLETIONS, "", 401),
    ("POST", COMPLETIONS, "authorization: Bearer wrong\r\n", 401),
    ("POST", "/reload", "", 401),
    ("POST", "/decisions", "", 405),
    ("PUT", COMPLETIONS, "authorization: Bearer right\r\n", 405),
    ("POST", "/nowhere", "authorization: Bearer right\r\n", 404),
]


@pytest.mark.parametrize("expect", ["expect: 100-continue\r\n", ""], ids=["expects", "sends"])
@pytest.mark.parametrize(("method", "path", "lines", "status"), REFUSED_BY_HEAD)
def test_what_the_head_decides_is_answered_before_the_body(
    method: str, path: str, lines: str, status: int, expect: str
) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=1, api_keys=("right",)) as setup:
            client = await setup.client()
            head = HEAD_AND_LENGTH.format(path=path, length=4_000_000, lines=lines + expect)
            client.writer.write(head.replace("POST", method, 1).encode())
            answer = await client.answer()
            assert answer.status == status and answer.headers["connection"] == "close"
            assert (answer.headers.get("www-authenticate") == "Bearer") == (status == 401)
            assert setup.router.metrics.refusals[status] == 1
            assert await client.closed_by_router() == b""

    check()


@async_test
async def test_a_client_that_may_is_told_to_continue_and_one_that_sent_all_is_told_nothing() -> None:
    async with running(mixed=1, api_keys=("right",)) as setup:
        client = await setup.client()
        lines = "authorization: Bearer right\r\nexpect: 100-continue\r\n"
        head = HEAD_AND_LENGTH.format(path=COMPLETIONS, length=len(BODY), lines=lines).encode()
        client.writer.write(head)
        assert (await client.head())[0] == 100
        client.writer.write(BODY)
        assert (await client.answer()).status == 200
        client.writer.write(head + BODY)
        assert (await client.answer()).status == 200
        # A wrong key does not cost the connection when nothing is left to be read from it.
        assert (await client.ask(COMPLETIONS, PROMPT)).status == 401
        assert (await client.ask(COMPLETIONS, PROMPT, "authorization: Bearer right\r\n")).status == 200


@async_test
async def test_a_refusal_by_the_head_comes_after_the_answers_before_it() -> None:
    async with running(mixed=1, api_keys=("right",)) as setup:
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT, "authorization: Bearer right\r\n")
        await until(lambda: setup.in_flight == 1 or len(setup.engines["m0"].seen) == 1)
        client.writer.write(
            HEAD_AND_LENGTH.format(path=COMPLETIONS, length=len(BODY), lines="").encode() + BODY[:5]
        )
        assert (await client.answer()).status == 200
        client.writer.write(BODY[5:])
        assert (await client.answer()).status == 401
