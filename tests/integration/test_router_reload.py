"""The configuration changes under a running router: all of it, or nothing."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcore.errors import ConfigError
from router.app import Router
from router.config import RouterConfig
from router.core.block_hash import block_hashes
from router.core.view import Role
from router.discovery import StaticDiscovery
from router.instance_spec import InstanceSpec
from tests.integration.event_publisher import EventPublisher, stored
from tests.integration.router_harness import MockEngine, Setup, Turn, async_test, until
from tests.integration.test_router_process import connect, exit_status, first_line, router_process

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}


class Written:
    """The configuration as it is written at the moment."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"port": 0, **settings}

    def read(self) -> RouterConfig:
        try:
            return msgspec.convert(self.settings, RouterConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from error


@asynccontextmanager
async def running(written: Written, *engines: MockEngine) -> AsyncIterator[Setup]:
    """A router of that configuration; its engines end with it."""
    config = written.read()
    router = Router(config, StaticDiscovery(config.instance_specs()), None, written.read)
    _, port = await router.start()
    setup = Setup(router, port, {})
    try:
        yield setup
        for client in setup.clients:
            client.close()
        await until(lambda: router.metrics.client_connections == 0)
    finally:
        await router.stop()
        for engine in engines:
            await engine.stop()


@async_test
async def test_engines_limits_and_keys_change_and_requests_under_way_end_well() -> None:
    first, second = await MockEngine("first").start(), await MockEngine("second").start()
    written = Written(worker_urls=[first.url])
    async with running(written, first, second) as setup:
        go_on = asyncio.Event()

        async def late(turn: Turn) -> None:
            await go_on.wait()
            await turn.answer(200, {"served_by": "late"})

        first.script.append(late)
        waiting = await setup.client()
        await waiting.send(COMPLETIONS, PROMPT)
        await until(lambda: len(first.seen) == 1)
        written.settings.update(worker_urls=[second.url], api_keys=["k"], max_concurrent_requests=7)
        answer = await setup.ask("/reload", {})
        assert answer.status == 200
        assert answer.json == {"changed": ["api_keys", "max_concurrent_requests", "worker_urls"]}
        await until(lambda: list(setup.router.cluster.instances) == [second.url])
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 401
        served = await setup.ask(COMPLETIONS, PROMPT, "authorization: Bearer k\r\n")
        assert served.json["served_by"] == "second"
        go_on.set()
        assert (await waiting.answer()).json == {"served_by": "late"}
        assert (await setup.ask("/reload", {})).status == 401
        assert (await setup.ask("/reload", method="GET")).status == 405


@async_test
async def test_policies_and_slos_change_the_next_decision() -> None:
    engine = await MockEngine("m").start()
    written = Written(worker_urls=[engine.url], policy="cache_aware")
    async with running(written, engine) as setup:
        assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        written.settings["scheduling"] = {"admission": "early", "ttft_slo_ms": 0.001}
        written.settings["policy"] = "global_cache_aware"
        assert (await setup.ask("/reload", {})).status == 200
        refused = await setup.ask(COMPLETIONS, PROMPT)
        assert refused.status == 429 and refused.json["error"]["code"] == "ttft_slo"


@async_test
async def test_an_engine_that_publishes_elsewhere_is_followed_there() -> None:
    engine = await MockEngine("m").start()
    first, second = EventPublisher(), EventPublisher()
    first.publish([stored([1], list(range(16)))])
    second.publish([stored([1, 2], list(range(32)))])

    def events(publisher: EventPublisher) -> list[str]:
        return [f"{engine.url}={publisher.endpoint},{publisher.replay_endpoint}"]

    written = Written(worker_urls=[engine.url], kv_events=events(first))
    async with running(written, engine) as setup:
        index, hashes = setup.router.index, block_hashes(list(range(32)), 16)
        assert index is not None

        def held() -> int:
            instances = setup.router.cluster.book.view(0.0).mixed
            return index.match(hashes, 0.0).local_blocks_of(instances)[0] if instances else -1

        await until(lambda: held() == 1)
        written.settings["kv_events"] = events(second)
        assert (await setup.ask("/reload", {})).json == {"changed": ["kv_events"]}
        await until(lambda: held() == 2)
    first.close()
    second.close()


@async_test
async def test_a_bad_configuration_changes_nothing_and_says_why() -> None:
    engine = await MockEngine("m").start()
    written = Written(worker_urls=[engine.url])
    async with running(written, engine) as setup:
        before = setup.router.config
        for bad, complaint in (
            ({"worker_urls": [engine.url, "ftp://x:1"], "api_keys": ["k"]}, "over http://"),
            ({"worker_urls": [], "api_keys": ["k"]}, "no engines"),
            ({"port": 99, "api_keys": ["k"]}, "port: cannot change"),
            ({"max_concurrent_requests": -1, "api_keys": ["k"]}, "max_concurrent_requests"),
            ({"policy": "best", "api_keys": ["k"]}, "least_loaded"),
        ):
            written.settings = {"port": 0, "worker_urls": [engine.url], **bad}
            answer = await setup.ask("/reload", {})
            assert answer.status == 409 and complaint in answer.json["error"]["message"]
            assert setup.router.config is before
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200


def test_sighup_reads_the_file_again(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        first, second = await MockEngine("first").start(), await MockEngine("second").start()
        file = tmp_path / "router.toml"
        file.write_text(f'worker_urls = ["{first.url}"]\n')
        async with router_process("--config", str(file)) as process:
            client = await connect(await first_line(process))
            assert (await client.ask(COMPLETIONS, PROMPT)).json["served_by"] == "first"
            file.write_text("worker_urls = [")
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            # Else the next signal may come while the file is being read, and the two become one.
            while "the configuration stays as it was" not in (await process.stderr.readline()).decode():
                assert not process.stderr.at_eof()
            assert (await client.ask(COMPLETIONS, PROMPT)).json["served_by"] == "first"
            file.write_text(f'worker_urls = ["{second.url}"]\n')
            process.send_signal(signal.SIGHUP)
            for _ in range(2000):
                if (await client.ask(COMPLETIONS, PROMPT)).json["served_by"] == "second":
                    break
            else:
                raise AssertionError("the second engine was never asked")
            process.send_signal(signal.SIGTERM)
            assert await exit_status(process) == 0
            client.close()
        await first.stop()
        await second.stop()

    check()


@async_test
async def test_engines_that_were_discovered_are_asked_what_the_new_configuration_wants() -> None:
    engine, bootstrap = await MockEngine("p").start(), await MockEngine("bootstrap").start()
    bootstrap.default = lambda turn: turn.answer(200, {"0": {"engine_id": "e", "worker_addr": {}}})
    written = Written(pd_protocol="nixl", discovery={"source": "file", "file": "engines.toml"})
    specs = [InstanceSpec(engine.url, Role.PREFILL), InstanceSpec("http://127.0.0.1:9", Role.DECODE)]

    class Told:
        async def changes(self) -> AsyncIterator[list[InstanceSpec]]:
            yield specs
            await asyncio.Event().wait()

    router = Router(written.read(), Told(), None, written.read)
    await router.start()
    try:
        instance = router.cluster.instances[engine.url]
        written.settings.update(pd_protocol="mooncake", bootstrap_port=bootstrap.port)
        router.reload()
        await until(lambda: router.bootstrap.server_of(instance) is not None)
        written.settings.update(prefill_policy="least_loaded")
        engine.metrics = b"vllm:num_requests_running 7\nvllm:num_requests_waiting 0\n"
        router.reload()
        await until(lambda: router.cluster.book.look(0.0)[engine.url].foreign_requests == 7)
    finally:
        await router.stop()
        await engine.stop()
        await bootstrap.stop()


def test_a_discovery_that_breaks_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app._DISCOVER_AGAIN_S", 0.01)

    @async_test
    async def run() -> None:
        first, second = (InstanceSpec(f"http://127.0.0.1:{port}", Role.MIXED) for port in (8, 9))
        times = iter([[first], [second]])

        class Breaks:
            async def changes(self) -> AsyncIterator[list[InstanceSpec]]:
                yield [next(times)[0]]
                await asyncio.sleep(0.01)
                raise ValueError("nobody thought of this")

        written = Written(discovery={"source": "file", "file": "engines.toml"})
        router = Router(written.read(), Breaks(), None, written.read)
        await router.start()
        try:
            await until(lambda: list(router.cluster.instances) == [second.url])
        finally:
            await router.stop()

    run()
