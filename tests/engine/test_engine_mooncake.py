"""The router's `mooncake` protocol with real engines: vLLM's MooncakeConnector over Mooncake's TCP."""

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.engine.packages import MOONCAKE_ENVIRONMENT, mooncake_transfer_engine
from tests.engine.rig import BLOCK_TOKENS, DOCUMENT, ROOT, end_process, free_port
from tests.engine.served import MODEL, Server, ended, router_server, vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

COMPLETIONS = "/v1/completions"
FETCHED = "vllm:external_prefix_cache_hits_total"


class Cluster(NamedTuple):
    start_prefill: Callable[[], Server]
    prefill: Server
    decode: Server
    router: Server


@pytest.fixture(scope="module")
def cluster(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("mooncake")
    port, bootstrap_port = free_port(), free_port()

    def start(role: str, port: int | None = None) -> Server:
        transfer = {
            "kv_connector": "MooncakeConnectorOnCpu",
            "kv_connector_module_path": "tests.engine.mooncake_on_cpu",
            "kv_role": role,
            "kv_connector_extra_config": {"mooncake_protocol": "tcp", "num_workers": 2},
        }
        environment = {
            **MOONCAKE_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(map(str, (mooncake_transfer_engine(), ROOT))),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port),
        }
        return vllm_server(model, transfer, directory / f"{role}.log", environment, port)

    prefill, decode = start("kv_producer", port), start("kv_consumer")
    with ended(prefill, decode):
        for engine in (prefill, decode):
            engine.wait("/health")
        router = router_server(
            directory / "router.log",
            *("--prefill", prefill.url, str(bootstrap_port), "--decode", decode.url),
            *("--pd-protocol", "mooncake", "--health.interval-ms", "500"),
        )
        with ended(router):
            router.wait("/ready")
            yield Cluster(lambda: start("kv_producer", port), prefill, decode, router)


def ask(prompt: list[int], **changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, **changes}


def answer(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.post(COMPLETIONS, body)[1])
    return found


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_decode_fetches_what_prefill_computed_and_answers_the_same(cluster: Cluster) -> None:
    for start, length in enumerate((BLOCK_TOKENS - 3, 400, 1000)):
        prompt = DOCUMENT[start : start + length]
        before = cluster.decode.metric(FETCHED)
        through = answer(cluster.router, ask(prompt))
        assert cluster.decode.metric(FETCHED) == before + length, "the whole prompt"
        alone = answer(cluster.prefill, ask(prompt))
        assert through["choices"][0]["text"] == alone["choices"][0]["text"]
        assert through["usage"]["completion_tokens"] == 16
    assert cluster.router.metric("mooncake_router_decode_only_total") == 0


def test_cached_tokens_are_those_of_the_prefill_engine(cluster: Cluster) -> None:
    prompt = DOCUMENT[5:900]
    answer(cluster.prefill, ask(prompt[: 4 * BLOCK_TOKENS + 1], max_tokens=1))
    stream = ask(prompt, max_tokens=200, stream=True, stream_options={"include_usage": True}, ignore_eos=True)
    _, text = cluster.router.post(COMPLETIONS, stream)
    *events, usage, done = text.removeprefix("data: ").rstrip().split("\n\ndata: ")
    assert done == "[DONE]" and len(events) > 1
    assert json.loads(usage)["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_TOKENS


def test_a_client_that_leaves_frees_the_decode_engine(cluster: Cluster) -> None:
    connection = http.client.HTTPConnection(cluster.router.url.removeprefix("http://"), timeout=60)
    body = json.dumps(ask(DOCUMENT[9:500], max_tokens=1500, stream=True, ignore_eos=True))
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
    assert connection.getresponse().read(16)
    connection.close()
    for engine in (cluster.decode, cluster.prefill):
        wait_until(lambda engine=engine: not engine.metric("vllm:num_requests_running"))
    assert cluster.router.metric("mooncake_router_active_requests") == 0


def test_a_prefill_engine_that_dies_is_done_without_and_used_again_when_it_is_back(cluster: Cluster) -> None:
    prompt = DOCUMENT[11:700]
    wanted = answer(cluster.prefill, ask(prompt))["choices"][0]["text"]
    end_process(cluster.prefill.process)
    assert answer(cluster.router, ask(prompt))["choices"][0]["text"] == wanted
    assert cluster.router.metric("mooncake_router_decode_only_total") == 1
    # It comes back as another engine, which the router learns from its bootstrap server.
    with ended(cluster.start_prefill()):
        fetched, start = cluster.decode.metric(FETCHED), 13

        def is_used_again() -> bool:
            nonlocal start
            start += 1
            answer(cluster.router, ask(DOCUMENT[start : start + 300], max_tokens=1))
            return cluster.decode.metric(FETCHED) > fetched

        wait_until(is_used_again)
