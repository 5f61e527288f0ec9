"""SGLang's disaggregation, with engines that wait for their partner as SGLang's do."""

from typing import Any

from tests.integration.router_harness import Turn, async_test, dies, fails, hangs, running, until

CHAT = "/v1/chat/completions"
PROMPT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "priority": 2}


def sglang(prefill: int = 1, decode: int = 1, **config: Any) -> Any:
    return running(prefill=prefill, decode=decode, pd_protocol="sglang", **config)


@async_test
async def test_both_engines_get_the_same_body_and_room_at_once() -> None:
    async with sglang(bootstrap_port=9001) as setup:

        async def waits_for_decode(turn: Turn) -> None:
            await until(lambda: len(setup.engines["d0"].seen) >= 1)
            await turn.answer(200, {"choices": []})

        setup.engines["p0"].default = waits_for_decode
        answer = await setup.ask(CHAT, {**PROMPT, "stream": True})
        assert answer.events[-1] == "[DONE]"
        (prefill,), (decode,) = setup.engines["p0"].seen, setup.engines["d0"].seen
        assert prefill.raw_body == decode.raw_body
        room = decode.body["bootstrap_room"]
        assert 0 <= room < 2**63
        assert decode.body == {
            **PROMPT,
            "stream": True,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": 9001,
            "bootstrap_room": room,
        }
        await setup.ask(CHAT, PROMPT)
        assert setup.engines["d0"].seen[1].body["bootstrap_room"] != room


@async_test
async def test_a_prefill_that_fails_ends_the_decode_and_a_fresh_pair_is_tried() -> None:
    async with sglang(prefill=2) as setup:
        setup.engines["p0"].default = fails(500)
        setup.engines["d0"].script.append(hangs)
        answers = [await setup.ask(CHAT, PROMPT) for _ in range(1)]
        assert [a.status for a in answers] == [200]
        await until(lambda: setup.engines["d0"].num_abandoned == 1)
        rooms = [seen.body["bootstrap_room"] for seen in setup.engines["d0"].seen]
        assert len(set(rooms)) == 2
        assert setup.engines["p1"].seen[0].body["bootstrap_room"] == rooms[1]


@async_test
async def test_a_decode_that_fails_ends_the_prefill_and_a_fresh_pair_is_tried() -> None:
    async with sglang(decode=2) as setup:
        setup.engines["p0"].script.append(hangs)
        setup.engines["d0"].default = dies
        assert (await setup.ask(CHAT, PROMPT)).status == 200
        await until(lambda: setup.engines["p0"].num_abandoned == 1)
        first, second = (seen.body["bootstrap_room"] for seen in setup.engines["p0"].seen)
        assert first != second == setup.engines["d1"].seen[0].body["bootstrap_room"]


@async_test
async def test_nobody_is_left_waiting_when_there_is_nobody_else() -> None:
    async with sglang() as setup:
        setup.engines["p0"].script.append(fails(503, "retry-after: 5\r\n"))
        setup.engines["d0"].script.append(hangs)
        refused = await setup.ask(CHAT, PROMPT)
        assert refused.status == 503 and refused.headers["retry-after"] == "5"
        await until(lambda: setup.engines["d0"].num_abandoned == 1)
        setup.engines["p0"].default = dies
        setup.engines["d0"].script.append(hangs)
        assert (await setup.ask(CHAT, PROMPT)).status == 502
        await until(lambda: setup.engines["d0"].num_abandoned == 2)
        setup.engines["p0"].default = hangs
        setup.engines["d0"].script.append(fails(429, "retry-after: 6\r\n"))
        refused = await setup.ask(CHAT, PROMPT)
        assert refused.status == 429 and refused.headers["retry-after"] == "6"
        await until(lambda: setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_a_bad_request_is_the_prefill_engines_answer() -> None:
    async with sglang(prefill=2) as setup:
        for name in ("p0", "p1"):
            setup.engines[name].default = fails(400)
        setup.engines["d0"].default = hangs
        assert (await setup.ask(CHAT, PROMPT)).status == 400
        await until(lambda: setup.engines["d0"].num_abandoned == 1)
        assert len(setup.engines["p0"].seen) + len(setup.engines["p1"].seen) == 1


@async_test
async def test_a_client_that_leaves_ends_both() -> None:
    async with sglang() as setup:
        setup.engines["p0"].default = setup.engines["d0"].default = hangs
        client = await setup.client()
        await client.send(CHAT, PROMPT)
        await until(lambda: len(setup.engines["d0"].seen) == len(setup.engines["p0"].seen) == 1)
        client.close()
        await until(lambda: setup.engines["d0"].num_abandoned == setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_without_a_prefill_engine_it_is_a_503_that_says_why() -> None:
    async with sglang() as setup:
        setup.router.cluster.instances[setup.engines["p0"].url].draining = True
        refused = await setup.ask(CHAT, PROMPT)
        assert refused.status == 503 and "cannot prefill" in refused.json["error"]["message"]
        assert setup.engines["d0"].seen == []


@async_test
async def test_several_samples_of_a_prompt_are_refused_because_they_would_never_end() -> None:
    async with sglang() as setup:
        refused = await setup.ask(CHAT, {**PROMPT, "n": 3})
        assert refused.status == 400 and "send 3 requests" in refused.json["error"]["message"]
        for two in ("2", 2.0):  # their pydantic takes both
            assert (await setup.ask(CHAT, {**PROMPT, "n": two})).status == 400
        assert setup.engines["p0"].seen == setup.engines["d0"].seen == []
        for served in (1, None, "two"):
            assert (await setup.ask(CHAT, {**PROMPT, "n": served})).status == 200
            assert setup.engines["p0"].seen[-1].body["n"] == served


@async_test
async def test_a_prefill_that_outlives_the_answer_is_closed_after_a_while() -> None:
    async with sglang() as setup:
        setup.engines["p0"].default = hangs
        assert (await setup.ask(CHAT, PROMPT)).status == 200
        await until(lambda: setup.engines["p0"].num_abandoned == 1)
        assert setup.in_flight == 0
