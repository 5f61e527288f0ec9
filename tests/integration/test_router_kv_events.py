"""The router's index follows publishers over real ZMQ sockets, through gaps, restarts and deaths."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvcore.wire.events import BlockRemoved, BlockStored, Medium
from router.app import Router
from router.config import RouterConfig
from router.core.block_hash import block_hashes
from router.discovery import StaticDiscovery
from router.instance_spec import Health
from tests.integration.event_publisher import EventPublisher, stored
from tests.integration.router_harness import Setup, Turn, async_test, running, until

TOKENS = list(range(64))
HASHES = [101, 102, 103, 104]
OWN = block_hashes(TOKENS, 16)


@asynccontextmanager
async def followed(publisher: EventPublisher, replay: bool = True, **config: Any) -> AsyncIterator[Setup]:
    """A router and one engine, whose events come from `publisher`."""
    async with running(mixed=1) as engines:
        url = engines.engines["m0"].url
        endpoints = f"{publisher.endpoint},{publisher.replay_endpoint}" if replay else publisher.endpoint
        settings = RouterConfig(port=0, worker_urls=(url,), kv_events=(f"{url}={endpoints}",), **config)
        router = Router(settings, StaticDiscovery(settings.instance_specs()))
        _, port = await router.start()
        try:
            await until(publisher.is_heard)
            yield Setup(router, port, engines.engines)
        finally:
            await router.stop()
            publisher.close()


def held(setup: Setup) -> int:
    """Leading blocks the first engine holds."""
    assert setup.router.index is not None
    instance = setup.router.cluster.book.view(0.0).mixed[0]
    return setup.router.index.match(OWN, 0.0).local_blocks_of([instance])[0]


def stats(setup: Setup) -> Any:
    assert setup.router.events is not None
    return next(subscriber for _, subscriber in setup.router.events.subscribers()).feed.stats


@async_test
async def test_what_was_published_before_is_asked_for_and_what_comes_is_followed() -> None:
    publisher = EventPublisher()
    publisher.publish([stored(HASHES[:2], TOKENS[:32])])
    async with followed(publisher) as setup:
        await until(lambda: held(setup) == 2)
        publisher.publish([stored(HASHES[2:], TOKENS[32:], parent=HASHES[1])])
        await until(lambda: held(setup) == 4)
        publisher.publish([BlockRemoved([HASHES[3]])])
        await until(lambda: held(setup) == 3)
        scraped = (await setup.ask("/metrics")).body.decode()
        assert "mooncake_router_index_blocks 3.0" in scraped
        url = setup.engines["m0"].url
        assert f'mooncake_router_kv_event_batches_total{{publisher="{url}"}} 3.0' in scraped
        setup.clients[0].close()


@async_test
async def test_a_gap_is_closed_by_a_replay() -> None:
    publisher = EventPublisher()
    async with followed(publisher) as setup:
        await until(lambda: publisher.num_replays == 1 and stats(setup).batches == 0)
        publisher.publish([stored(HASHES[:1], TOKENS[:16])])
        await until(lambda: held(setup) == 1)
        publisher.publish([stored(HASHES[1:2], TOKENS[16:32], parent=HASHES[0])], lost=True)
        publisher.publish([stored(HASHES[2:3], TOKENS[32:48], parent=HASHES[1])])
        await until(lambda: held(setup) == 3)
        assert stats(setup).gaps == 1 and stats(setup).losses == 0


@async_test
async def test_without_a_replay_endpoint_a_gap_costs_what_was_known() -> None:
    publisher = EventPublisher()
    async with followed(publisher, replay=False) as setup:
        publisher.publish([stored(HASHES[:2], TOKENS[:32])])
        await until(lambda: held(setup) == 2)
        publisher.publish([], lost=True)
        publisher.publish([stored([7], [9] * 16)])
        await until(lambda: held(setup) == 0)
        assert stats(setup).losses >= 1 and publisher.num_replays == 0


@async_test
async def test_a_restarted_engine_starts_from_nothing() -> None:
    publisher = EventPublisher()
    publisher.publish([stored(HASHES[:2], TOKENS[:32])])
    async with followed(publisher) as setup:
        await until(lambda: held(setup) == 2)
        publisher.publish([stored(HASHES[2:], TOKENS[32:], parent=HASHES[1])])
        await until(lambda: held(setup) == 4)
        publisher.buffer.clear()
        publisher.publish([stored([7], [9] * 16)])
        await until(lambda: held(setup) == 0 and stats(setup).restarts == 1)


@async_test
async def test_an_engine_that_is_down_holds_nothing_until_it_is_back() -> None:
    publisher = EventPublisher()
    publisher.publish([stored(HASHES, TOKENS)])
    async with followed(publisher) as setup:
        await until(lambda: held(setup) == 4)
        instance = setup.router.cluster.instances[setup.engines["m0"].url]
        assert setup.router.events is not None and setup.router.index is not None
        instance.health = Health.DOWN
        setup.router.events.sweep()
        assert held(setup) == 0
        await until(lambda: setup.router.index is not None and not setup.router.index.sweep())
        assert setup.router.index.table.num_blocks == 0  # tidied up in the background
        instance.health = Health.UP
        setup.router.events.sweep()
        await until(lambda: held(setup) == 4)


@async_test
async def test_messages_that_make_no_sense_are_counted_and_passed_over() -> None:
    publisher = EventPublisher()
    async with followed(publisher) as setup:
        await until(lambda: publisher.num_replays == 1)
        publisher.publish([stored(HASHES[:1], TOKENS[:16])])
        await until(lambda: held(setup) == 1)
        publisher.raw([b"kv", b"short", b"x"])
        publisher.raw([b"kv", (1).to_bytes(8, "big"), b"\xc1"])
        publisher.buffer.append(b"\xc1")
        publisher.publish([stored(HASHES[1:2], TOKENS[16:32], parent=HASHES[0])])
        await until(lambda: held(setup) == 2)
        assert setup.router.events is not None
        _, subscriber = next(iter(setup.router.events.subscribers()))
        assert (subscriber.num_malformed, stats(setup).bad_batches) == (1, 1)


@async_test
async def test_a_store_on_the_engines_host_counts_as_local() -> None:
    publisher, store = EventPublisher(), EventPublisher()
    publisher.publish([stored(HASHES, TOKENS)])
    async with followed(publisher, store_kv_events=(f"{store.endpoint},{store.replay_endpoint}",)) as setup:
        await until(lambda: held(setup) == 4)
        store.publish([BlockStored(HASHES, None, [], 0, Medium.CPU)])
        index = setup.router.index
        assert index is not None
        await until(lambda: index.match(OWN, 0.0).best_worker >= 0)
        publisher.publish([BlockRemoved(HASHES)])
        await until(lambda: stats(setup).batches == 2)
        match = index.match(OWN, 0.0)
        assert (match.best_blocks, match.best_medium, held(setup)) == (4, Medium.CPU, 4)
        assert index.worker_ids[match.best_worker] == f"store {store.endpoint}"
    store.close()


@async_test
async def test_engines_that_connect_are_listened_to() -> None:
    probe = EventPublisher()
    probe.close()
    publisher = EventPublisher(connects_to=probe.endpoint)
    publisher.publish([stored(HASHES, TOKENS)])
    publisher.endpoint = f"@{probe.endpoint}"
    async with followed(publisher) as setup:
        await until(lambda: held(setup) == 4)
        publisher.publish([BlockRemoved([HASHES[3]])])
        await until(lambda: held(setup) == 3)


@async_test
async def test_an_endpoint_that_is_taken_stops_the_start() -> None:
    taken = EventPublisher()
    config = RouterConfig(port=0, worker_urls=("a:1",), kv_events=(f"a:1=@{taken.endpoint}",))
    router = Router(config, StaticDiscovery(config.instance_specs()))
    with pytest.raises(ConfigError, match="Address already in use"):
        await router.start()
    await router.stop()
    taken.close()


@async_test
async def test_a_prefix_fetched_from_a_store_counts_until_its_prefill_is_done() -> None:
    store = EventPublisher()
    store.publish([stored(HASHES, TOKENS)])
    # Another host than the engines': what it holds is not theirs.
    endpoints = ",".join(
        one.replace("127.0.0.1", "localhost") for one in (store.endpoint, store.replay_endpoint)
    )
    go_on = asyncio.Event()

    async def late(turn: Turn) -> None:
        await go_on.wait()
        await turn.answer(200, {"choices": []})

    async with running(mixed=2, policy="global_cache_aware", store_kv_events=[endpoints]) as setup:
        index, book = setup.router.index, setup.router.cluster.book
        assert index is not None
        await until(lambda: index.match(OWN, 0.0).best_blocks == 4)
        for engine in setup.engines.values():
            engine.default = late
        client = await setup.client()
        await client.send("/v1/completions", {"model": "m", "prompt": TOKENS})
        source = index.match(OWN, 0.0).best_worker
        await until(lambda: book.view(0.0).transfers_from == {source: 1})
        go_on.set()
        assert (await client.answer()).status == 200
        await until(lambda: book.view(0.0).transfers_from == {})
        (decision,) = (await client.ask("/decisions")).json["decisions"]
        assert decision["transfer"]["source"] == f"store {endpoints.partition(',')[0]}"
        assert (decision["transfer"]["first_block"], decision["transfer"]["num_blocks"]) == (0, 4)
        assert setup.router.metrics.transfers == {decision["transfer"]["source"]: 1}
    store.close()
