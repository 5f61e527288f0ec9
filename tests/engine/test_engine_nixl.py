"""The router's `nixl` protocol with real engines: vLLM's NixlConnector over UCX's TCP."""

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engine.packages import unpacked
from tests.engine.rig import BLOCK_TOKENS, DOCUMENT, end_process, free_port
from tests.engine.served import MODEL, Server, ended, router_server, vllm_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# 1.5.2 asks for a build of itself that was never published.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="session")
def nixl_path() -> Path:
    """NIXL with its UCX, which load without CUDA; in a folder of its own beside the engines' packages."""
    return unpacked("-".join(NIXL), *NIXL)


class Cluster(NamedTuple):
    prefill: Server
    decode: Server
    router: Server


@pytest.fixture(scope="module")
def cluster(model: str, nixl_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("nixl")
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    engines = [
        vllm_server(
            model,
            transfer,
            directory / f"{name}.log",
            {
                "PYTHONPATH": str(nixl_path),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp",
            },
        )
        for name in ("prefill", "decode")
    ]
    with ended(*engines):
        for engine in engines:
            engine.wait("/health")
        router = router_server(
            directory / "router.log",
            *("--prefill", engines[0].url, "--decode", engines[1].url, "--pd-protocol", "nixl"),
        )
        with ended(router):
            router.wait("/ready")
            yield Cluster(*engines, router)


def ask(prompt: list[int], **changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, **changes}


def answer(server: Server, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    headers, text = server.post(COMPLETIONS, body)
    return headers, json.loads(text)


def test_decode_fetches_what_prefill_computed_and_answers_the_same(cluster: Cluster) -> None:
    prompt = DOCUMENT[:1000]
    headers, through = answer(cluster.router, ask(prompt))
    assert headers["x-mooncake-prefill-cached-tokens"] == "0"
    assert cluster.decode.metric("vllm:nixl_xfer_time_seconds_count") == 1
    _, alone = answer(cluster.prefill, ask(prompt))
    assert through["choices"][0]["text"] == alone["choices"][0]["text"]
    assert through["usage"]["completion_tokens"] == 16


def test_cached_tokens_are_those_of_the_prefill_engine(cluster: Cluster) -> None:
    prompt = DOCUMENT[5:900]
    answer(cluster.prefill, ask(prompt[: 4 * BLOCK_TOKENS + 1], max_tokens=1))
    _, found = answer(cluster.router, ask(prompt))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_TOKENS
    stream = ask(DOCUMENT[7:900], stream=True, stream_options={"include_usage": True})
    _, text = cluster.router.post(COMPLETIONS, stream)
    *events, usage, done = text.removeprefix("data: ").rstrip().split("\n\ndata: ")
    assert done == "[DONE]" and len(events) > 1
    assert json.loads(usage)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_client_that_leaves_frees_the_decode_engine(cluster: Cluster) -> None:
    host = cluster.router.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    body = json.dumps(ask(DOCUMENT[9:500], max_tokens=1500, stream=True, ignore_eos=True))
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
    assert connection.getresponse().read(16)
    connection.close()
    deadline = time.monotonic() + 60
    while cluster.decode.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_dead_prefill_engine_leaves_the_decode_engine_to_do_it_all(cluster: Cluster) -> None:
    prompt = DOCUMENT[11:700]
    _, before = answer(cluster.decode, ask(prompt))
    end_process(cluster.prefill.process)
    _, after = answer(cluster.router, ask(prompt))
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert cluster.router.metric("mooncake_router_decode_only_total") == 1
