"""Requests refused for load that wait in front of the engines (scheduling.hold_ms)."""

import json

from tests.integration.router_harness import Client, Setup, Turn, async_test, running, until

COMPLETIONS = "/v1/completions"
# 2,000 tokens take 200 s: two of them do not fit into a TTFT SLO of 300 s, one does, however slow a test is.
SLOW = {"constant_ms": 0.0, "per_token_ms": 100.0, "per_token2_ms": 0.0}
SCHEDULING = {"admission": "early", "ttft_slo_ms": 300_000, "hold_ms": 20, "prefill_model": SLOW}
FIRST = {"model": "m", "prompt": list(range(2000))}
SECOND = {"model": "m", "prompt": list(range(5000, 7000))}


async def stays(turn: Turn) -> None:
    await turn.gone()


async def occupy(setup: Setup) -> Client:
    """A client whose prompt the engine never answers."""
    setup.engines["m0"].script.append(stays)
    client = await setup.client()
    await client.send(COMPLETIONS, FIRST)
    await until(lambda: len(setup.engines["m0"].seen) == 1)
    return client


@async_test
async def test_who_does_not_fit_is_served_when_there_is_room_again() -> None:
    async with running(mixed=1, policy="least_loaded", scheduling=SCHEDULING) as setup:
        first = await occupy(setup)
        held = await setup.client()
        await held.send(COMPLETIONS, SECOND, "x-mooncake-explain: 1\r\n")
        await until(lambda: setup.router.metrics.holds > 2)
        assert len(setup.engines["m0"].seen) == 1
        listed = (await setup.ask("/decisions")).json["decisions"]
        assert listed[0]["held"]["reason"] == "ttft_slo" and listed[0]["rejected"] is None
        assert "hold:ttft_slo" in listed[0]["reasons"]
        first.close()
        answer = await held.answer()
        assert answer.status == 200
        assert json.loads(answer.headers["x-mooncake-decision"])["held"] is None
        assert "mooncake_router_holds_total" in (await setup.ask("/metrics")).body.decode()


@async_test
async def test_who_cannot_be_served_in_time_is_refused_at_last() -> None:
    async with running(mixed=1, policy="least_loaded", scheduling=SCHEDULING) as setup:
        await occupy(setup)
        refused = await setup.ask(COMPLETIONS, SECOND, "x-slo-ttft-ms: 150\r\n")
        assert refused.status == 429 and refused.json["error"]["code"] == "ttft_slo"
        assert 1 <= setup.router.metrics.holds <= 7
        assert setup.router.metrics.rejections == {"ttft_slo": 1}


@async_test
async def test_a_client_that_leaves_while_it_is_held_leaves_nothing_behind() -> None:
    async with running(mixed=1, policy="least_loaded", scheduling=SCHEDULING) as setup:
        first = await occupy(setup)
        held = await setup.client()
        await held.send(COMPLETIONS, SECOND)
        await until(lambda: setup.router.metrics.holds > 0)
        held.close()
        await until(lambda: setup.router.metrics.active_requests == 1)
        first.close()
        await until(lambda: setup.router.metrics.active_requests == 0)
        assert setup.router.cluster.book.num_requests == 0
        assert len(setup.engines["m0"].seen) == 1
