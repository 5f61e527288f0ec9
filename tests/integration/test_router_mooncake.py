"""vLLM's MooncakeConnector protocol, with engines and bootstrap servers that speak its shapes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.integration.router_harness import (
    Behaviour,
    MockEngine,
    Seen,
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
PROMPT = {"model": "m", "prompt": "Once upon a time", "max_tokens": 3, "priority": 1}
USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 39}}


class Bootstrap:
    """A prefill engine's bootstrap server, as vLLM 0.32 answers."""

    def __init__(self, name: str, ranks: int = 1) -> None:
        self.server = MockEngine(name)
        self.server.default = self._answer
        self.engine_ids = {str(rank): f"{name}-engine-{rank}" for rank in range(ranks)}

    async def _answer(self, turn: Turn) -> None:
        assert (turn.seen.method, turn.seen.path) == ("GET", "/query")
        address = {"0": {"0": "tcp://127.0.0.1:1"}}
        await turn.answer(
            200, {rank: {"engine_id": one, "worker_addr": address} for rank, one in self.engine_ids.items()}
        )


@asynccontextmanager
async def mooncake(
    prefill: int = 1, decode: int = 1, ranks: int = 1, ready: bool = True, **config: Any
) -> AsyncIterator[tuple[Setup, list[Bootstrap]]]:
    servers = [Bootstrap(f"b{i}", ranks) for i in range(prefill)]
    for one in servers:
        await one.server.start()
    ports = tuple(one.server.port for one in servers)
    async with running(
        prefill=prefill, decode=decode, bootstrap_ports=ports, pd_protocol="mooncake", **config
    ) as setup:
        instances = setup.router.cluster.instances.values()
        for instance in instances:
            if ready and instance.role.value == "prefill":
                await until(lambda i=instance: setup.router.bootstrap.server_of(i) is not None)  # type: ignore[misc]
        yield setup, servers
    for one in servers:
        await one.server.stop()


def after_decode(setup: Setup, behaviour: Behaviour, num_seen: int = 1) -> Behaviour:
    """Not before the decode engine has that many requests."""

    async def behave(turn: Turn) -> None:
        await until(lambda: len(setup.engines["d0"].seen) >= num_seen)
        await behaviour(turn)

    return behave


def params(seen: Seen) -> dict[str, Any]:
    found = seen.body["kv_transfer_params"]
    assert isinstance(found, dict)
    return found


@async_test
async def test_both_legs_at_once_under_one_transfer_id() -> None:
    async with mooncake() as (setup, servers):

        async def waits_for_decode(turn: Turn) -> None:
            await until(lambda: len(setup.engines["d0"].seen) >= 1)
            await turn.answer(200, {"choices": [], "kv_transfer_params": None})

        setup.engines["p0"].default = waits_for_decode
        assert (await setup.ask(COMPLETIONS, {**PROMPT, "stream": True})).events[-1] == "[DONE]"
        (prefill,), (decode,) = setup.engines["p0"].seen, setup.engines["d0"].seen
        transfer_id = params(prefill)["transfer_id"]
        assert transfer_id.startswith("xfer-")
        assert params(prefill) == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": transfer_id,
        }
        assert params(decode) == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": servers[0].server.url,
            "remote_engine_id": "b0-engine-0",
            "transfer_id": transfer_id,
        }
        assert prefill.body["max_tokens"] == 1 and prefill.body["stream"] is False
        assert decode.body["max_tokens"] == 3 and decode.body["priority"] == 1
        assert "x-data-parallel-rank" not in prefill.headers
        await setup.ask(COMPLETIONS, PROMPT)
        assert params(setup.engines["d0"].seen[1])["transfer_id"] != transfer_id


@async_test
async def test_ranks_are_told_to_both_engines() -> None:
    async with mooncake(ranks=4) as (setup, _):
        for _ in range(16):
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        await until(lambda: len(setup.engines["p0"].seen) == 16)
        seen = zip(setup.engines["p0"].seen, setup.engines["d0"].seen, strict=True)
        ranks = set()
        for prefill, decode in seen:
            rank = prefill.headers["x-data-parallel-rank"]
            assert params(decode)["remote_engine_id"] == f"b0-engine-{rank}"
            ranks.add(rank)
        assert len(ranks) > 1
        await setup.ask(COMPLETIONS, PROMPT, "x-data-parallel-rank: 3\r\n")
        await until(lambda: len(setup.engines["p0"].seen) == 17)
        assert setup.engines["p0"].seen[-1].headers["x-data-parallel-rank"] == "3"
        assert params(setup.engines["d0"].seen[-1])["remote_engine_id"] == "b0-engine-3"


@async_test
async def test_a_prefill_that_fails_ends_the_decode_at_once_and_a_new_pair_is_tried() -> None:
    async with mooncake(prefill=2) as (setup, _):
        setup.engines["p0"].default = after_decode(setup, fails(500))
        setup.engines["d0"].script.append(hangs)
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        await until(lambda: setup.engines["d0"].num_abandoned == 1)
        first, second = (params(seen) for seen in setup.engines["d0"].seen)
        assert first["transfer_id"] != second["transfer_id"]
        assert second["remote_engine_id"] == "b1-engine-0"


@async_test
async def test_when_every_prefill_fails_the_decode_engine_computes_it_all() -> None:
    async with mooncake(prefill=2) as (setup, _):
        setup.engines["p0"].default = after_decode(setup, dies)
        setup.engines["p1"].default = after_decode(setup, dies, 2)
        setup.engines["d0"].script.extend([hangs, hangs])
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[-1].body == PROMPT
        assert setup.router.metrics.decode_only == 1
        await until(lambda: setup.engines["d0"].num_abandoned == 2)


@async_test
async def test_a_decode_engine_that_never_looked_is_replaced_under_the_same_id() -> None:
    async with mooncake(decode=2) as (setup, _):
        setup.engines["d0"].default = fails(503, "retry-after: 7\r\n")
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert len(setup.engines["p0"].seen) == 1
        assert params(setup.engines["d0"].seen[0]) == params(setup.engines["d1"].seen[0])
        setup.engines["d1"].default = fails(429, "retry-after: 7\r\n")
        refused = await setup.ask(COMPLETIONS, PROMPT)
        assert refused.status in (429, 503) and refused.headers["retry-after"] == "7"
        assert len(setup.engines["p0"].seen) == 2


@async_test
async def test_a_decode_engine_that_dies_gets_a_new_pair() -> None:
    async with mooncake(decode=2) as (setup, _):
        setup.engines["d0"].default = dies
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        first, second = (params(seen)["transfer_id"] for seen in setup.engines["p0"].seen)
        assert first != second == params(setup.engines["d1"].seen[0])["transfer_id"]


@async_test
async def test_a_bad_request_is_the_prefill_engines_answer() -> None:
    async with mooncake(prefill=2) as (setup, _):
        setup.engines["p0"].default = setup.engines["p1"].default = after_decode(setup, fails(400))
        setup.engines["d0"].default = hangs
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 400
        await until(lambda: setup.engines["d0"].num_abandoned == 1)


@async_test
async def test_a_client_that_leaves_ends_both() -> None:
    async with mooncake() as (setup, _):
        setup.engines["p0"].default = setup.engines["d0"].default = hangs
        client = await setup.client()
        await client.send(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["d0"].seen) == len(setup.engines["p0"].seen) == 1)
        client.close()
        await until(lambda: setup.engines["d0"].num_abandoned == setup.engines["p0"].num_abandoned == 1)


@async_test
async def test_an_engine_started_anew_is_known_by_its_new_id_after_a_failure() -> None:
    async with mooncake() as (setup, servers):
        servers[0].engine_ids = {"0": "reborn"}
        setup.engines["p0"].script.append(fails(500))
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        (instance,) = (i for i in setup.router.cluster.instances.values() if i.role.value == "prefill")

        def is_reborn() -> bool:
            server = setup.router.bootstrap.server_of(instance)
            return server is not None and server.engine_ids == {0: "reborn"}

        await until(is_reborn)
        await setup.ask(COMPLETIONS, PROMPT)
        assert params(setup.engines["d0"].seen[-1])["remote_engine_id"] == "reborn"


@async_test
async def test_without_an_answer_of_the_bootstrap_server_the_decode_engine_is_alone() -> None:
    async with mooncake(ready=False, prefill=1) as (setup, servers):
        servers[0].engine_ids = {}
        (instance,) = (i for i in setup.router.cluster.instances.values() if i.role.value == "prefill")
        setup.router.bootstrap.ask_again(instance)
        await until(lambda: len(servers[0].server.seen) >= 2)
        await until(lambda: setup.router.bootstrap.server_of(instance) is None)
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        assert setup.engines["d0"].seen[0].body == PROMPT and setup.engines["p0"].seen == []


@async_test
async def test_the_answer_says_what_the_prefill_engine_had_cached() -> None:
    async with mooncake() as (setup, _):
        prefilled = {**USAGE, "prompt_tokens_details": {"cached_tokens": 16}}

        async def prefills(turn: Turn) -> None:
            await turn.answer(200, {"choices": [], "usage": prefilled})

        async def decodes(turn: Turn) -> None:
            await until(lambda: setup.router.metrics.legs["prefill", "2xx"] == 1)
            await turn.answer(200, {"choices": [], "usage": USAGE})

        setup.engines["p0"].default, setup.engines["d0"].default = prefills, decodes
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["usage"] == prefilled


def says_nothing(comment: str = "") -> Behaviour:
    """As vLLM: the head of a stream at once, what is in it when the KV is there, which never comes."""

    async def behave(turn: Turn) -> None:
        await turn.begin_stream()
        if comment:
            await turn.send(f"{len(comment):x}\r\n{comment}\r\n".encode())
        await turn.gone()

    return behave


@async_test
async def test_a_decode_engine_that_has_only_begun_its_stream_gets_a_new_pair_when_the_prefill_fails() -> (
    None
):
    async with mooncake(prefill=2) as (setup, _):
        setup.engines["p0"].default = after_decode(setup, fails(500))
        setup.engines["d0"].script.append(says_nothing())
        answer = await setup.ask(COMPLETIONS, {**PROMPT, "stream": True})
        assert (answer.status, len(answer.events)) == (200, 4)
        await until(lambda: setup.engines["d0"].num_abandoned == 1)
        first, second = (params(seen) for seen in setup.engines["d0"].seen)
        assert first["transfer_id"] != second["transfer_id"]


@async_test
async def test_a_stream_of_comments_ends_with_an_error_event_when_the_prefill_fails() -> None:
    async with mooncake() as (setup, _):
        commented = asyncio.Event()

        async def fails_then(turn: Turn) -> None:
            await commented.wait()
            await fails(500)(turn)

        setup.engines["p0"].default = fails_then
        setup.engines["d0"].script.append(says_nothing(": waiting\n\n"))
        client = await setup.client()
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        assert (await client.head())[0] == 200
        commented.set()
        rest = (await client.closed_by_router()).decode()
        assert ": waiting" in rest and "the answer is incomplete: the prefill engine answered 500" in rest
        assert "[DONE]" not in rest and rest.endswith("0\r\n\r\n")
        await until(lambda: setup.engines["d0"].num_abandoned == 1)


@async_test
async def test_a_stream_begins_for_the_client_when_the_prefill_is_done() -> None:
    async with mooncake() as (setup, _):
        may_end = asyncio.Event()
        setup.engines["p0"].default = after_decode(setup, well)

        async def begins(turn: Turn) -> None:
            await turn.begin_stream()
            await may_end.wait()
            await turn.event("{}")
            await turn.end_stream()

        setup.engines["d0"].script.append(begins)
        client = await setup.client()
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        assert (await client.head())[0] == 200
        may_end.set()
        assert [chunk async for chunk in client.chunks()] == [b"data: {}\n\n", b"data: [DONE]\n\n"]


@async_test
async def test_a_client_that_leaves_a_stream_nobody_has_said_anything_in_ends_both() -> None:
    async with mooncake() as (setup, _):
        setup.engines["p0"].default = hangs
        setup.engines["d0"].default = says_nothing()
        client = await setup.client()
        await client.send(COMPLETIONS, {**PROMPT, "stream": True})
        await until(lambda: all(engine.seen for engine in setup.engines.values()))
        client.close()
        await until(lambda: all(setup.engines[name].num_abandoned == 1 for name in ("p0", "d0")))


@async_test
async def test_several_sequences_never_share_one_transfer_id() -> None:
    async with mooncake(prefill=2) as (setup, _):
        for several in ({"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"n": 3}, {"n": "3"}):
            assert (await setup.ask(COMPLETIONS, {**PROMPT, **several})).status == 200
            assert setup.engines["d0"].seen[-1].body == {**PROMPT, **several}
        assert not setup.engines["p0"].seen and not setup.engines["p1"].seen
        assert setup.router.metrics.decode_only == 4


@async_test
async def test_an_engine_that_fails_and_leaves_at_once_is_asked_no_more() -> None:
    async with mooncake() as (setup, _):
        router = setup.router
        (instance,) = (i for i in router.cluster.instances.values() if i.role.value == "prefill")
        asked = len(router.bootstrap._tasks)
        await until(lambda: instance in router.bootstrap._wanted)
        await asyncio.sleep(0.05)  # it waits now
        router.bootstrap.ask_again(instance)
        await asyncio.sleep(0)
        router.bootstrap.watch(())
        await until(lambda: instance not in router.bootstrap._wanted)
        assert asked == 1 and router.bootstrap.server_of(instance) is None
