"""Engines come and go in a file, in Redis and in Kubernetes while requests run: none is lost."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.app import Router
from router.config import RouterConfig
from router.discovery import make_discovery
from router.discovery.config import DiscoveryConfig
from tests.integration.kubernetes_api import KubernetesApi
from tests.integration.router_harness import DEADLINE_S, MockEngine, Setup, Turn, async_test, until
from tests.remotes import valkey_server

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}


@asynccontextmanager
async def discovering(**discovery: Any) -> AsyncIterator[Setup]:
    found = DiscoveryConfig(interval_ms=20, **discovery)
    config = RouterConfig(port=0, discovery=found)
    router = Router(config, make_discovery(found, config.instance_specs()))
    _, port = await asyncio.wait_for(router.start(), DEADLINE_S)
    setup = Setup(router, port, {})
    try:
        yield setup
        for client in setup.clients:
            client.close()
        await until(lambda: setup.in_flight == 0 and router.metrics.active_requests == 0)
    finally:
        await router.stop()


async def knows(setup: Setup, *engines: MockEngine) -> None:
    await until(lambda: set(setup.router.cluster.instances) == {engine.url for engine in engines})


async def check_coming_and_going(
    setup: Setup, write: Callable[..., None], first: MockEngine, second: MockEngine
) -> None:
    """`write(engines...)` makes the source say that exactly these are there."""
    assert (await setup.ask(COMPLETIONS, PROMPT)).status == 503
    write(first)
    await knows(setup, first)
    assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == first.name
    go_on = asyncio.Event()

    async def late(turn: Turn) -> None:
        await go_on.wait()
        await turn.answer(200, {"served_by": "late"})

    first.script.append(late)
    running = await setup.client()
    await running.send(COMPLETIONS, PROMPT)
    await until(lambda: len(first.seen) == 2)
    write(second)
    await knows(setup, second)
    assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == second.name
    go_on.set()
    assert (await running.answer()).json == {"served_by": "late"}
    write(first, second)
    await knows(setup, first, second)


@asynccontextmanager
async def started(*names: str) -> AsyncIterator[list[MockEngine]]:
    engines = [await MockEngine(name).start() for name in names]
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()


def test_a_file_is_followed_and_a_mistake_in_it_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text('{"engines": []}')

    def write(*engines: MockEngine) -> None:
        new = tmp_path / "new"
        new.write_text(json.dumps({"engines": [{"url": engine.url} for engine in engines]}))
        new.replace(path)

    @async_test
    async def check() -> None:
        async with (
            started("first", "second") as (first, second),
            discovering(source="file", file=str(path)) as setup,
        ):
            await check_coming_and_going(setup, write, first, second)
            path.write_text('{"engines": [{"url": "http://x:1", "rule": "mixed"}]}')
            await asyncio.sleep(0.2)
            path.unlink()
            await asyncio.sleep(0.2)
            await knows(setup, first, second)
            write(second)
            await knows(setup, second)

    check()


@pytest.mark.slow
def test_engines_register_in_redis_and_survive_its_restart(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        async with started("engine") as (engine,):
            with valkey_server(tmp_path) as server:
                async with discovering(source="redis", redis_url=server.url) as setup:
                    registrar = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-m", "router.cli", "register", "--url", engine.url),
                        *("--redis-url", server.url, "--ttl", "8s"),
                        stderr=asyncio.subprocess.PIPE,
                    )
                    try:
                        await knows(setup, engine)
                        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
                        # A Redis that was emptied, and one that is away, take nobody out.
                        with server.client() as client:
                            client.flushall()
                        server.kill()
                        await asyncio.sleep(0.5)
                        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
                        server.start()
                        with server.client() as client:
                            await until(lambda: client.hlen("mooncake-router:engines") == 1)
                        assert list(setup.router.cluster.instances) == [engine.url]
                        # An engine that is not well is not renewed, and its time runs out.
                        engine.healthy = False
                        await knows(setup)
                        engine.healthy = True
                        await knows(setup, engine)
                        registrar.send_signal(signal.SIGTERM)
                        await knows(setup)
                        assert await asyncio.wait_for(registrar.wait(), DEADLINE_S) == 0
                    finally:
                        if registrar.returncode is None:
                            registrar.kill()
                        await registrar.communicate()

    check()


def test_kubernetes_is_listed_watched_and_listed_again(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first-token\n")
    (tmp_path / "namespace").write_text("serving\n")

    @async_test
    async def check() -> None:
        async with (
            started("first", "second") as (first, second),
            KubernetesApi("serving", "first-token") as api,
        ):

            def write(*engines: MockEngine) -> None:
                api.set_slices({engine.name: [engine.port] for engine in engines}, service="vllm")

            settings = {
                "kubernetes_service": "vllm",
                "kubernetes_api": api.url,
                "kubernetes_credentials": str(tmp_path),
            }
            async with discovering(source="kubernetes", **settings) as setup:
                await check_coming_and_going(setup, write, first, second)
                api.end_watches()
                write(second)
                await knows(setup, second)
                api.forget_history()  # 410 Gone: list anew
                write(first)
                await knows(setup, first)
                (tmp_path / "token").write_text("second-token")  # as Kubernetes does it while a pod runs
                api.token = "second-token"
                api.end_watches()
                write(first, second)
                await knows(setup, first, second)
            assert api.num_lists >= 2

    check()


def test_pods_are_chosen_by_their_labels(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        async with (
            started("first", "second") as (first, second),
            KubernetesApi("default", "") as api,
        ):

            def write(*engines: MockEngine) -> None:
                api.set_pods({engine.name: engine.port for engine in engines}, app="vllm", tier="gpu")

            api.set_pods({"other": 1}, app="vllm", tier="cpu")
            settings = {"kubernetes_api": api.url, "kubernetes_credentials": str(tmp_path)}
            async with discovering(
                source="kubernetes", kubernetes_selector="app=vllm,tier=gpu", **settings
            ) as setup:
                await check_coming_and_going(setup, write, first, second)
                api.forget_history()
                write(second)
                await knows(setup, second)
            assert api.selectors == {"app=vllm,tier=gpu"}

    check()


def test_each_pool_may_have_a_selector_and_a_pod_of_both_changes_nothing(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        async with (
            started("prefill", "decode") as (prefill, decode),
            KubernetesApi("default", "") as api,
        ):
            settings = {
                "kubernetes_prefill_selector": "role=prefill",
                "kubernetes_decode_selector": "role=decode",
                "kubernetes_api": api.url,
                "kubernetes_credentials": str(tmp_path),
            }
            api.set_pods({"p": prefill.port}, role="prefill")
            async with discovering(source="kubernetes", **settings) as setup:
                api.set_pods({"d": decode.port}, role="decode")
                await knows(setup, prefill, decode)
                roles = {one.url: one.role.value for one in setup.router.cluster.instances.values()}
                assert roles == {prefill.url: "prefill", decode.url: "decode"}
                api.set_pods({"d": decode.port, "wrong": prefill.port}, role="decode")
                await asyncio.sleep(0.2)
                await knows(setup, prefill, decode)
                api.set_pods({}, role="decode")
                await knows(setup, prefill)

    check()


def test_a_kubernetes_that_cannot_be_reached_is_asked_again(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        async with started("engine") as (engine,), KubernetesApi("default", "") as api:
            api.is_down = True
            settings = {
                "kubernetes_prefill_service": "p",
                "kubernetes_decode_service": "d",
                "kubernetes_api": api.url,
                "kubernetes_credentials": str(tmp_path),
            }
            async with discovering(source="kubernetes", **settings) as setup:
                assert (await setup.ask(COMPLETIONS, PROMPT)).status == 503
                api.set_slices({"one": [engine.port]}, service="d")
                api.is_down = False
                await knows(setup, engine)
                assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
                api.is_down = True
                api.end_watches()
                await asyncio.sleep(0.2)
                assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200

    check()
