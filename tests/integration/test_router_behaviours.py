"""What happens when something goes wrong, the same table for every P/D protocol (docs/routing.md)."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

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
from tests.integration.test_router_mooncake import mooncake
from tests.integration.test_router_nixl import prefills

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time", "max_tokens": 3}
STREAM = {**PROMPT, "stream": True}
PROTOCOLS = ("suite", "nixl", "mooncake", "sglang")
# Decode engines that wait for their own prefill engine, and cannot compute a prompt themselves.
NEEDS_PREFILL = "sglang"

every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


@asynccontextmanager
async def serving(protocol: str, prefill: int = 1, decode: int = 1) -> AsyncIterator[Setup]:
    if protocol == "mooncake":
        async with mooncake(prefill=prefill, decode=decode) as (setup, _):
            yield setup
        return
    async with running(prefill=prefill, decode=decode, pd_protocol=protocol) as setup:
        for name, engine in setup.engines.items():
            engine.default = prefills if name[0] == "p" and protocol == "nixl" else well
        yield setup


def at_once(protocol: str) -> bool:
    return protocol != "nixl"


def after_decode(setup: Setup, protocol: str, behaviour: Behaviour) -> Behaviour:
    """Of a prefill engine, not before the decode leg beside it is there, where both go out at once: with
    `suite` there is one for all prefills, else one for each."""

    async def behave(turn: Turn) -> None:
        needed = {"nixl": 0, "suite": 1}.get(protocol, seen_by(setup, "p"))
        await until(lambda: seen_by(setup, "d") >= needed)
        await behaviour(turn)

    return behave


def seen_by(setup: Setup, kind: str) -> int:
    return sum(len(engine.seen) for name, engine in setup.engines.items() if name[0] == kind)


@every_protocol
def test_order_of_the_legs(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol) as setup:
            decode_came_first: list[bool] = []
            default = setup.engines["p0"].default

            async def prefill(turn: Turn) -> None:
                if at_once(protocol):
                    await until(lambda: len(setup.engines["d0"].seen) == 1)
                decode_came_first.append(bool(setup.engines["d0"].seen))
                await default(turn)

            setup.engines["p0"].default = prefill
            assert (await setup.ask(COMPLETIONS, STREAM)).events[-1] == "[DONE]"
            await until(lambda: decode_came_first == [at_once(protocol)])

    check()


@every_protocol
def test_prefill_500_goes_to_the_next_prefill_engine(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, prefill=2) as setup:
            setup.engines["p0"].script.append(after_decode(setup, protocol, fails(500)))

            async def when_prefilled(turn: Turn) -> None:
                await until(lambda: bool(setup.engines["p1"].seen))
                await well(turn)

            partner = {"suite": [when_prefilled], "nixl": []}.get(protocol, [hangs])
            setup.engines["d0"].script.extend(partner)
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
            assert [len(setup.engines[name].seen) for name in ("p0", "p1")] == [1, 1]

    check()


@every_protocol
def test_prefill_500_everywhere_is_decode_only(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, prefill=2) as setup:
            for name in ("p0", "p1"):
                setup.engines[name].default = after_decode(setup, protocol, fails(500))

            async def when_given_up(turn: Turn) -> None:
                await until(lambda: setup.router.metrics.decode_only == 1)
                await well(turn)

            partner = {"suite": [when_given_up], "nixl": []}.get(protocol, [hangs, hangs])
            setup.engines["d0"].script.extend(partner)
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == (500 if protocol == NEEDS_PREFILL else 200)
            assert setup.router.metrics.decode_only == int(protocol != NEEDS_PREFILL)

    check()


@every_protocol
def test_prefill_400_is_the_clients_answer_and_the_decode_leg_is_closed(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, prefill=2) as setup:
            for name in ("p0", "p1"):
                setup.engines[name].default = after_decode(setup, protocol, fails(400))
            setup.engines["d0"].default = hangs
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == 400 and " says 400" in answer.json["error"]["message"]
            assert seen_by(setup, "p") == 1
            await until(lambda: setup.engines["d0"].num_abandoned == int(at_once(protocol)))

    check()


@every_protocol
@pytest.mark.parametrize("status", [503, 429])
def test_decode_busy_after_the_prefill_goes_to_another_decode_engine(protocol: str, status: int) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, decode=2) as setup:
            for name in ("d0", "d1"):
                setup.engines[name].script.append(fails(status, "retry-after: 9\r\n"))
            setup.engines["d1"].script.clear()
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
            # With a room of its own for each pair there is nothing another decode engine could fetch.
            assert seen_by(setup, "p") == (2 if protocol == "sglang" else 1)

    check()


@every_protocol
@pytest.mark.parametrize("status", [503, 429])
def test_every_decode_engine_busy_keeps_status_and_retry_after(protocol: str, status: int) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, decode=2) as setup:
            for name in ("d0", "d1"):
                setup.engines[name].default = fails(status, "retry-after: 9\r\n")
            refused = await setup.ask(COMPLETIONS, PROMPT)
            assert refused.status == status and refused.headers["retry-after"] == "9"
            assert seen_by(setup, "p") <= (2 if protocol == "sglang" else 1)

    check()


@every_protocol
def test_a_client_gone_during_the_prefill_ends_both(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol) as setup:
            setup.engines["p0"].default = setup.engines["d0"].default = hangs
            client = await setup.client()
            await client.send(COMPLETIONS, PROMPT)
            num_decode = int(at_once(protocol))
            await until(lambda: seen_by(setup, "p") == 1 and seen_by(setup, "d") == num_decode)
            client.close()
            await until(lambda: setup.engines["p0"].num_abandoned == 1)
            await until(lambda: setup.engines["d0"].num_abandoned == num_decode)

    check()


@every_protocol
def test_a_client_gone_in_mid_stream_ends_the_decode(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async def endless(turn: Turn) -> None:
            await turn.begin_stream()
            await turn.event('{"choices": []}')
            await turn.gone()

        async with serving(protocol) as setup:
            setup.engines["d0"].default = endless
            client = await setup.client()
            await client.send(COMPLETIONS, STREAM)
            assert (await client.head())[0] == 200
            client.close()
            await until(lambda: setup.engines["d0"].num_abandoned == 1)

    check()


@every_protocol
def test_a_decode_engine_that_dies_in_mid_stream_is_an_error_event_and_no_done(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async def half(turn: Turn) -> None:
            await turn.begin_stream()
            await turn.event('{"choices": [{"text": "half"}]}')
            turn.cut_gently()

        async with serving(protocol) as setup:
            setup.engines["d0"].default = half
            events = (await setup.ask(COMPLETIONS, STREAM)).events
            assert '"text": "half"' in events[0] and "the answer is incomplete" in events[1]
            assert len(events) == 2

    check()


@every_protocol
def test_a_decode_engine_that_dies_before_its_first_byte_is_replaced(protocol: str) -> None:
    @async_test
    async def check() -> None:
        async with serving(protocol, decode=2) as setup:
            setup.engines["d0"].default = dies
            assert [(await setup.ask(COMPLETIONS, PROMPT)).status for _ in range(2)] == [200, 200]

    check()


@every_protocol
def test_headers_and_unknown_fields_reach_both_engines(protocol: str) -> None:
    @async_test
    async def check() -> None:
        lines = {
            "x-request-id": "mine",
            "authorization": "Bearer clients-own",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        }
        body: dict[str, Any] = {**STREAM, "priority": 3, "cache_salt": "s"}
        raw = json.dumps(body).encode()[:-1] + b', "of_the_future": {"x": [1.50]}}'
        async with serving(protocol) as setup:
            headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            answer = await setup.ask(COMPLETIONS, raw, headers)
            assert answer.status == 200 and answer.headers["x-request-id"] == "mine"
            for name in ("p0", "d0"):
                (seen,) = setup.engines[name].seen
                assert lines.items() <= seen.headers.items()
                assert (seen.body["priority"], seen.body["cache_salt"]) == (3, "s")
                assert b'{"x": [1.50]}' in seen.raw_body

    check()
