"""Requests follow their prefixes and SLOs through the whole router: bodies in, engines chosen, 429 out."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.wire.events import BlockStored
from router.app import Router
from router.config import RouterConfig
from router.core.estimator import PrefillModel
from router.core.settings import Settings
from router.discovery import StaticDiscovery
from tests.integration.event_publisher import EventPublisher
from tests.integration.router_harness import Setup, Turn, async_test, running, until, well
from tests.unit.router_prompts.small_tokenizers import definition

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# A prefill of 1 ms a token: prompts are expensive and what is saved is easily seen.
SLOW = {"constant_ms": 0.0, "per_token_ms": 1.0, "per_token2_ms": 0.0}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


async def served_by(setup: Setup, path: str, body: Any) -> str:
    answer = await setup.ask(path, body)
    assert answer.status == 200, answer.body
    return str(answer.json["served_by"])


@pytest.mark.parametrize("policy", ["cache_aware", "global_cache_aware"])
def test_equal_beginnings_meet_at_one_engine(policy: str) -> None:
    @async_test
    async def check() -> None:
        async with running(mixed=3, policy=policy, scheduling={"prefill_model": SLOW}) as setup:
            homes = {}
            for group in "abc":
                homes[group] = await served_by(setup, CHAT, chat(group * 2000))
            for turn, order in enumerate(("cab", "bca", "acb", "bac")):
                for group, home in ((group, homes[group]) for group in order):
                    assert await served_by(setup, CHAT, chat(group * 2000 + f"turn {turn}")) == home
            assert setup.router.cluster.book.num_requests == 0

    check()


@async_test
async def test_kv_events_decide_where_token_ids_go() -> None:
    tokens = list(range(512))
    hashes = list(range(1000, 1032))
    async with running(mixed=2) as engines:
        publishers = {name: EventPublisher() for name in engines.engines}
        urls = tuple(engine.url for engine in engines.engines.values())
        sources = tuple(
            f"{engines.engines[name].url}={p.endpoint},{p.replay_endpoint}" for name, p in publishers.items()
        )
        settings = RouterConfig(
            port=0,
            worker_urls=urls,
            kv_events=sources,
            policy="cache_aware",
            scheduling=Settings(prefill_model=PrefillModel(0.0, 1.0, 0.0)),
        )
        router = Router(settings, StaticDiscovery(settings.instance_specs()))
        _, port = await router.start()
        setup = Setup(router, port, engines.engines)
        await until(lambda: all(p.is_heard() for p in publishers.values()))
        publishers["m1"].publish([BlockStored(hashes, None, tokens, 16)])
        await until(lambda: router.index is not None and router.index.table.num_blocks == 32)
        for _ in range(4):
            assert await served_by(setup, COMPLETIONS, {"prompt": tokens, "max_tokens": 4}) == "m1"
        for client in setup.clients:
            client.close()
        await router.stop()
        for publisher in publishers.values():
            publisher.close()


def test_a_tokenizer_makes_texts_meet_kv_events(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("llama3")))

    @async_test
    async def check() -> None:
        config = {"policy": "cache_aware", "prompts": {"tokenizer": str(tmp_path)}}
        async with running(mixed=2, **config) as setup:
            text = "The quick brown fox. " * 100
            home = await served_by(setup, COMPLETIONS, {"prompt": text})
            for _ in range(3):
                assert await served_by(setup, COMPLETIONS, {"prompt": text + "And then?"}) == home
            scraped = (await setup.ask("/metrics")).body.decode()
            assert 'mooncake_router_prompts_total{how="tokenized"} 2.0' in scraped
            assert 'mooncake_router_prompts_total{how="cached"} 2.0' in scraped
            for client in setup.clients:
                client.close()

    check()


def test_a_client_that_leaves_while_its_prompt_is_tokenised_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition("llama3")))

    @async_test
    async def check() -> None:
        config = {"policy": "cache_aware", "prompts": {"tokenizer": str(tmp_path), "threads": 1}}
        async with running(mixed=1, **config) as setup:
            # One that is read to its end before its client has left would else have its answer.
            setup.engines["m0"].default = stays
            clients = [await setup.client() for _ in range(4)]
            for number, client in enumerate(clients):
                await client.send(COMPLETIONS, {"prompt": f"{number} fox " * 50_000})
            for client in clients:
                client.close()
            await until(lambda: setup.router.metrics.client_connections == 0)
            await until(lambda: setup.router.prompts is not None and setup.router.prompts.num_waiting == 0)
            assert setup.router.metrics.clients_gone == 4
            setup.engines["m0"].default = well
            assert await served_by(setup, COMPLETIONS, {"prompt": "well?"}) == "m0"

    check()


async def stays(turn: Turn) -> None:
    await turn.gone()


@async_test
async def test_a_ttft_slo_that_cannot_be_met_is_a_429_that_says_so() -> None:
    # Minutes: what the first prompt still takes is predicted to shrink while the test goes on.
    slower = {**SLOW, "per_token_ms": 100.0}
    scheduling = {"admission": "early", "ttft_slo_ms": 300_000, "prefill_model": slower}
    async with running(mixed=1, policy="least_loaded", scheduling=scheduling) as setup:
        setup.engines["m0"].default = stays
        first = await setup.client()
        await first.send(COMPLETIONS, {"prompt": list(range(2000))})
        await until(lambda: len(setup.engines["m0"].seen) == 1)
        refused = await setup.ask(COMPLETIONS, {"prompt": list(range(5000, 7000))})
        assert refused.status == 429 and refused.json["error"]["code"] == "ttft_slo"
        assert int(refused.headers["retry-after"]) >= 1
        assert len(setup.engines["m0"].seen) == 1
        patient = await setup.client()
        await patient.send(COMPLETIONS, {"prompt": list(range(2000))}, "x-slo-ttft-ms: 6000000\r\n")
        await until(lambda: len(setup.engines["m0"].seen) == 2)
        scraped = (await setup.ask("/metrics")).body.decode()
        assert 'mooncake_router_rejections_total{reason="ttft_slo"} 1.0' in scraped


@async_test
async def test_what_does_not_generate_is_never_refused_for_load() -> None:
    scheduling = {"admission": "early", "ttft_slo_ms": 1, "prefill_model": SLOW}
    async with running(mixed=1, scheduling=scheduling) as setup:
        assert (await setup.ask(COMPLETIONS, {"prompt": [1, 2, 3]})).status == 429
        assert (await setup.ask("/v1/models")).status == 200


@async_test
async def test_baseline_looks_at_decoding_when_the_prefill_is_done() -> None:
    scheduling = {"admission": "baseline", "tbt_slo_ms": 1e-6}
    async with running(prefill=1, decode=1, policy="global_cache_aware", scheduling=scheduling) as setup:
        setup.engines["d0"].default = stays
        refused = await setup.ask(COMPLETIONS, {"prompt": [1, 2, 3]})
        assert refused.status == 429 and refused.json["error"]["code"] == "tbt_slo"
        assert len(setup.engines["p0"].seen) == 1
        await until(lambda: setup.engines["d0"].num_abandoned == 1)


@async_test
async def test_prefill_goes_by_prefix_and_decode_by_tbt() -> None:
    async with running(
        prefill=2,
        decode=2,
        prefill_policy="global_cache_aware",
        decode_policy="least_tbt",
        scheduling={"prefill_model": SLOW},
    ) as setup:
        body = {"prompt": list(range(1600)), "max_tokens": 4, "stream": True}
        answers = [await setup.ask(COMPLETIONS, body) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
        await until(lambda: sorted(len(setup.engines[name].seen) for name in ("p0", "p1")) == [0, 4])
        assert min(len(setup.engines[name].seen) for name in ("d0", "d1")) >= 1
        # Streams teach how long answers get: four events each.
        assert setup.router.cluster.book.history.expected_tokens("default", 1600, 0) == pytest.approx(4)
