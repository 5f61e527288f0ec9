"""Requests made to break the router: no connection is cut, nothing is a 500, for what a client may write."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.view import Role
from router.instance_spec import InstanceSpec
from tests.integration.router_harness import Turn, async_test, hangs, running, until, well

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time", "max_tokens": 3}
# Of 20 to 30 requests each, to each kind of cluster.
EXAMPLES = 4
PROTOCOLS = ("suite", "nixl", "mooncake", "sglang")


def nested(depth: int, field: str) -> bytes:
    return b'{"%b": %b1%b}' % (field.encode(), b"[" * depth, b"]" * depth)


@pytest.mark.parametrize("protocol", ["", *PROTOCOLS])
@pytest.mark.parametrize("field", ["messages", "prompt", "model", "kv_transfer_params", "unknown"])
def test_a_body_nested_deeply_is_a_400_or_the_engines_to_answer(protocol: str, field: str) -> None:
    @async_test
    async def run() -> None:
        roles = {"prefill": 1, "decode": 1, "pd_protocol": protocol} if protocol else {"mixed": 1}
        async with running(**roles, policy="cache_aware") as setup:

            async def answers(turn: Turn) -> None:
                await turn.answer(200, {"choices": []})

            for engine in setup.engines.values():
                engine.default = answers
            client = await setup.client()
            for depth in (100, *range(900, 1010, 3), 100_000):
                answer = await client.ask(CHAT, nested(depth, field))
                assert answer.status in (200, 400), answer.body
            assert answer.status == 400

    run()


def test_a_rank_of_many_digits_is_refused_like_any_other_that_is_none() -> None:
    @async_test
    async def run() -> None:
        async with running(mixed=1, data_parallel_size=2) as setup:
            client = await setup.client()
            for rank in ("2", "9" * 5000, "-1", "1.0", "\xb2"):
                answer = await client.ask("/v1/models", None, f"x-data-parallel-rank: {rank}\r\n")
                assert answer.status == 400, rank

    run()


@async_test
async def test_an_answer_held_for_the_client_reaches_it_to_its_last_byte() -> None:
    async with running(prefill=1, decode=1, pd_protocol="nixl") as setup:
        setup.engines["p0"].default = lambda turn: turn.answer(400, "no such prompt")
        client = await setup.client()
        for _ in range(2):
            answer = await client.ask(COMPLETIONS, PROMPT)
            assert (answer.status, answer.json) == (400, "no such prompt")


@async_test
async def test_a_decode_engine_that_left_meanwhile_is_not_asked_again_when_the_prefill_is_lost() -> None:
    async with running(prefill=1, decode=2, policy="round_robin") as setup:
        going = asyncio.Event()

        async def dies_later(turn: Turn) -> None:
            await going.wait()
            turn.cut()

        setup.engines["p0"].default = dies_later
        for name in ("d0", "d1"):
            setup.engines[name].default = hangs
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: any(setup.engines[name].seen for name in ("d0", "d1")))
        used, other = sorted(("d0", "d1"), key=lambda name: -len(setup.engines[name].seen))
        setup.engines[other].default = well
        cluster = setup.router.cluster
        cluster.apply([i.spec for i in cluster.instances.values() if i.url != setup.engines[used].url])
        going.set()
        answer = await asyncio.wait_for(client.answer(), 30)
        assert (answer.status, answer.json["served_by"]) == (200, other)
        await until(lambda: setup.engines[used].num_abandoned == 1)


@pytest.mark.parametrize(
    "endless", [b"1\r\nx\r\n0\r\nx-trailer: ", b"1\r\nx\r\n0\r\n", b"1;"], ids=["line", "lines", "extension"]
)
def test_what_comes_after_a_body_is_bounded_like_a_head(endless: bytes) -> None:
    @async_test
    async def run() -> None:
        async with running(mixed=1, http={"max_header_bytes": 4096}) as setup:
            client = await setup.client()
            client.writer.write(b"POST /v1/x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + endless)
            for _ in range(4096):
                client.writer.write(b"a: b\r\n" * 100 if endless.endswith(b"0\r\n") else b"a" * 600)
                await asyncio.sleep(0)
                if client.reader._buffer:  # type: ignore[attr-defined]
                    break
            assert (await client.answer()).status == 431

    run()


@async_test
async def test_an_engine_with_an_impossible_name_is_a_502_at_once() -> None:
    async with running(mixed=1) as setup:
        names = ("a..b", "x" * 70)
        setup.router.cluster.apply(InstanceSpec(f"http://{name}:80", Role.MIXED) for name in names)
        for _ in names:
            answer = await setup.ask(COMPLETIONS, PROMPT)
            assert answer.status == 502 and "cannot be reached" in answer.json["error"]["message"]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**60]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1e308, -1e308, 5e-324]),
    st.text(max_size=6),
    st.sampled_from(["", "2", "two", "user", "text", "true", "\x00", "\U0001f600"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = (
    *(
        "prompt",
        "messages",
        "model",
        "max_tokens",
        "max_completion_tokens",
        "priority",
        "n",
        "stream",
        "tools",
    ),
    *("cache_salt", "add_special_tokens", "kv_transfer_params", "prompt_embeds", "echo", "logprobs", "stop"),
    *(
        "bootstrap_room",
        "stream_options",
        "min_tokens",
        "chat_template_kwargs",
        "lora",
        "logit_bias",
        "best_of",
    ),
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)
NUMBERS = st.sampled_from(
    ["", "0", "-0", "1", "1e308", "5e-324", "nan", "inf", "1_0", "0x1", "9" * 400, "\xb2", "1,2"]
)
HEADERS = st.dictionaries(
    st.sampled_from(["x-slo-ttft-ms", "x-slo-tpot-ms", "x-data-parallel-rank", "x-mooncake-explain"])
    | st.sampled_from(["x-session-id", "x-request-id", "traceparent", "authorization", "accept-encoding"]),
    NUMBERS | st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20),
    max_size=4,
)
ASKED = st.tuples(st.sampled_from([CHAT, COMPLETIONS]), BODIES, HEADERS)
# Whatever is predicted counts: each request is priced, some are refused.
ADMITS = {"admission": "predictive_request", "ttft_slo_ms": 50.0, "tbt_slo_ms": 20.0}
CLUSTERS: dict[str, dict[str, Any]] = {
    "blind": {"mixed": 2},
    "sticky": {"mixed": 2, "policy": "session_sticky"},
    "aware": {"mixed": 2, "policy": "cache_aware", "scheduling": ADMITS},
    "elastic": {"prefill": 1, "decode": 2, "policy": "elastic", "scheduling": ADMITS},
    **{name: {"prefill": 1, "decode": 2, "pd_protocol": name} for name in PROTOCOLS},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(asked=st.lists(ASKED, min_size=20, max_size=30))
def test_whatever_a_body_or_a_header_says_an_engine_or_a_reason_answers(
    cluster: str, asked: list[tuple[str, dict[str, Any], dict[str, str]]]
) -> None:
    @async_test
    async def run() -> None:
        async with running(**CLUSTERS[cluster]) as setup:

            async def answers(turn: Turn) -> None:
                json.loads(turn.seen.raw_body)
                await turn.answer(200, {"choices": [], "usage": None, "kv_transfer_params": {"a": 1}})

            for engine in setup.engines.values():
                engine.default = answers
            client = await setup.client()
            for path, body, headers in asked:
                lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                answer = await client.ask(path, body, lines)
                assert answer.status in (200, 400, 429), (answer, path, body, headers)
            assert (await client.ask("/decisions")).status == 200

    run()


@async_test
async def test_no_path_climbs_out_of_what_clients_may_ask() -> None:
    async with running(mixed=1) as setup:
        client = await setup.client()
        for path in (
            "/v1/../sleep",
            "/v1/%2e%2e/sleep",
            "/v1/.%2E/sleep",
            "/v1/x/..%2f../sleep",
            "/v1/..%5Csleep",
        ):
            assert (await client.ask(path, {})).status == 404, path
        assert not setup.engines["m0"].seen
        for path in ("/v1/models/Qwen2.5..7B", "/v1/models/a%2Fb", "/v1/models?x=../y"):
            assert (await client.ask(path)).status == 200, path
