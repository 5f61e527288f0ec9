"""Why a request went where it went, as a client and an operator can read it."""

import json

from tests.integration.router_harness import async_test, running

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": list(range(160)), "max_tokens": 4}
EXPLAIN = "x-mooncake-explain: 1\r\n"


@async_test
async def test_a_response_explains_itself_when_asked() -> None:
    async with running(prefill=2, decode=1, policy="global_cache_aware") as setup:
        told = await setup.ask(COMPLETIONS, PROMPT, EXPLAIN)
        silent = await setup.ask(COMPLETIONS, PROMPT)
        assert "x-mooncake-decision" not in silent.headers
        decision = json.loads(told.headers["x-mooncake-decision"])
        urls = {name: engine.url for name, engine in setup.engines.items()}
        assert decision["decode"] == urls["d0"] and decision["prefill"] in (urls["p0"], urls["p1"])
        assert decision["prompt_tokens"] == 160 and decision["ttft_ms"] > 0 and decision["rejected"] is None
        assert {one["instance_id"] for one in decision["candidates"]} == set(urls.values())
        assert decision["reasons"][0] == "least_ttft"


@async_test
async def test_refusals_are_explained_and_listed_newest_first() -> None:
    scheduling = {"admission": "early", "ttft_slo_ms": 0.001}
    async with running(mixed=1, scheduling=scheduling) as setup:
        refused = await setup.ask(COMPLETIONS, PROMPT, EXPLAIN + "x-request-id: one\r\n")
        rejected = json.loads(refused.headers["x-mooncake-decision"])["rejected"]
        assert refused.status == 429 and rejected["reason"] == "ttft_slo"
        assert rejected["predicted"] > rejected["limit"] == 0.001
        await setup.ask(COMPLETIONS, PROMPT, "x-slo-ttft-ms: 100000\r\nx-request-id: two\r\n")
        listed = (await setup.ask("/decisions")).json["decisions"]
        assert [one["request_id"] for one in listed] == ["two", "one"]
        assert [bool(one["rejected"]) for one in listed] == [False, True]


@async_test
async def test_only_so_many_are_kept() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        for number in range(300):
            assert (await client.ask(COMPLETIONS, PROMPT, f"x-request-id: {number}\r\n")).status == 200
        listed = (await client.ask("/decisions")).json["decisions"]
        assert len(listed) == 256 and listed[0]["request_id"] == "299"


@async_test
async def test_the_list_is_for_those_with_a_key() -> None:
    async with running(mixed=1, api_keys=["secret"]) as setup:
        assert (await setup.ask("/decisions")).status == 401
        key = "authorization: Bearer secret\r\n"
        assert (await setup.ask("/decisions", headers=key)).json == {"decisions": []}
