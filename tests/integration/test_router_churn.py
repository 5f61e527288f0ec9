"""Engines that fail in every way, clients that leave, and a cluster that changes under both: whatever ends a
request, nothing of it stays behind."""

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.core.view import Role
from router.instance_spec import InstanceSpec
from tests.integration.router_harness import (
    DEADLINE_S,
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
from tests.integration.test_router_mooncake import Bootstrap

COMPLETIONS = "/v1/completions"
ENGINES = 3  # of each role
ROUNDS, CLIENTS, REQUESTS = 2, 16, 3


async def prefills(turn: Turn) -> None:
    usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    await turn.answer(200, {"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": {"a": 1}})


async def says_nothing(turn: Turn) -> None:
    await turn.begin_stream()
    await turn.gone()


async def comments_then_dies(turn: Turn) -> None:
    await turn.begin_stream()
    await turn.send(b"5\r\n: x\n\n\r\n")
    await asyncio.sleep(0.01)
    turn.cut_gently()


async def says_one_thing(turn: Turn) -> None:
    await turn.begin_stream()
    await turn.event("{}")
    await asyncio.sleep(0.01)
    turn.cut()


async def refuses_in_a_word(turn: Turn) -> None:
    await turn.answer(400, "no")


async def late(turn: Turn) -> None:
    await asyncio.sleep(0.02)
    await well(turn)


OFTEN: list[Behaviour] = [
    well,
    well,
    late,
    fails(500),
    fails(503, "retry-after: 1\r\n"),
    fails(429),
    fails(400),
]
SELDOM: list[Behaviour] = [dies, hangs, says_nothing, comments_then_dies, says_one_thing, refuses_in_a_word]


def behaving(chance: random.Random) -> Behaviour:
    async def behave(turn: Turn) -> None:
        others = [prefills] * 10 if turn.engine.name.startswith("p") else []
        await chance.choice([*OFTEN, *SELDOM, *others])(turn)

    return behave


@asynccontextmanager
async def cluster(protocol: str) -> Any:
    servers = [await Bootstrap(f"b{i}").server.start() for i in range(ENGINES)]
    try:
        async with running(
            prefill=ENGINES,
            decode=ENGINES,
            bootstrap_ports=tuple(server.port for server in servers),
            pd_protocol=protocol,
            breaker={"enabled": False},
            request_timeout_ms=400,
            policy="cache_aware",
        ) as setup:
            yield setup
    finally:
        for server in servers:
            await server.stop()


def changed(specs: list[InstanceSpec], chance: random.Random) -> Iterator[InstanceSpec]:
    """Some have left; some have come back as something else."""
    roles = list(Role) if chance.random() < 0.1 else [Role.PREFILL, Role.DECODE]
    role = chance.choice(roles)
    for spec in specs:
        if chance.random() < 0.8:
            swaps = role is Role.MIXED or chance.random() < 0.1
            yield InstanceSpec(spec.base_url, role if swaps else spec.role, None, spec.bootstrap_port)


async def change(setup: Setup, specs: list[InstanceSpec], chance: random.Random) -> None:
    while True:
        await asyncio.sleep(0.01)
        setup.router.cluster.apply(changed(specs, chance))
        setup.router._follow_cluster()


async def ask(setup: Setup, chance: random.Random) -> None:
    client = await setup.client()
    for _ in range(REQUESTS):
        prompt = ["a", "b"] if chance.random() < 0.1 else "x" * chance.randrange(300)
        await client.send(COMPLETIONS, {"prompt": prompt, "max_tokens": 3, "stream": chance.random() < 0.6})
        if chance.random() < 0.25:
            await asyncio.sleep(chance.random() * 0.05)
            client.writer.transport.abort()
            return
        try:
            answer = await asyncio.wait_for(client.answer(), DEADLINE_S)
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # an answer that could not be completed
        assert answer.status in (200, 400, 429, 502, 503, 504) or b"says 500" in answer.body, answer
        if answer.headers.get("connection") == "close":
            return


@pytest.mark.parametrize("protocol", ["suite", "nixl", "mooncake", "sglang"])
def test_nothing_of_a_request_stays_behind(protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(protocol)

    @async_test
    async def run() -> None:
        trouble: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: trouble.append(context))
        async with cluster(protocol) as setup:
            for engine in setup.engines.values():
                engine.default = behaving(chance)
            specs = [instance.spec for instance in setup.router.cluster.instances.values()]
            changing = asyncio.create_task(change(setup, specs, chance))
            for _ in range(ROUNDS):
                await asyncio.gather(*(ask(setup, chance) for _ in range(CLIENTS)))
            changing.cancel()
            await asyncio.wait((changing,))
            for client in setup.clients:
                client.close()
            router = setup.router
            await until(lambda: router.metrics.active_requests == 0)
            await until(lambda: not any(instance.in_flight for instance in router.cluster._leaving))
            await until(lambda: setup.in_flight == 0)
            book = router.cluster.book
            assert book.num_requests == len(book.forecast) == 0
            for state in book.look(0.0).values():
                assert (state.in_flight_requests, state.running_requests, state.kv_used_tokens) == (0, 0, 0)
        assert not trouble

    run()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
