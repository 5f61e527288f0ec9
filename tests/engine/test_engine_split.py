"""The router's P/D protocols with real vLLM engines. Tests of one protocol are in the order of what is left
of the cluster after each.

The table of docs/routing.md has more rows, which take engines that fail as told:
tests/integration/test_router_behaviours.py.
"""

import http.client
import json
import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.engine.rig import BLOCK_TOKENS, DOCUMENT, end_process
from tests.engine.served import Server
from tests.engine.split import COMPLETIONS, FETCHED_TOKENS, PROTOCOLS, Cluster, answer, ask, split_cluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=PROTOCOLS)
def cluster(
    request: pytest.FixtureRequest, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    with split_cluster(request.param, model, tmp_path_factory.mktemp(request.param)) as cluster:
        yield cluster


def text_of(server: Server, prompt: list[int]) -> str:
    text: str = answer(server, ask(prompt))["choices"][0]["text"]
    return text


def streamed(server: Server, prompt: list[int], max_tokens: int = 16) -> tuple[str, int]:
    """(text, cached tokens)"""
    body = ask(prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True})
    _, text = server.post(COMPLETIONS, body)
    *events, done = text.removeprefix("data: ").rstrip().split("\n\ndata: ")
    assert done == "[DONE]" and len(events) > 2
    chunks = [json.loads(event) for event in events]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(pieces), chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def open_stream(
    cluster: Cluster, prompt: list[int]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Once it has begun; it takes the decode engine seconds to end it."""
    connection = http.client.HTTPConnection(cluster.router.url.removeprefix("http://"), timeout=240)
    body = json.dumps(ask(prompt, max_tokens=1400, stream=True))
    connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200 and response.read(16)
    return connection, response


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def kill(server: Server) -> None:
    """Not asked to end, which gives vLLM the time to finish an answer. Its own processes go with it."""
    process = psutil.Process(server.process.pid)
    for member in (process, *process.children(recursive=True)):
        member.kill()
    server.process.wait()


def test_decode_fetches_what_prefill_computed_and_answers_the_same(cluster: Cluster) -> None:
    for start, length in enumerate((BLOCK_TOKENS - 3, 400, 1000)):
        prompt = DOCUMENT[start : start + length]
        before = cluster.decode.metric(FETCHED_TOKENS)
        through = text_of(cluster.router, prompt)
        fetched = cluster.decode.metric(FETCHED_TOKENS) - before
        assert (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS <= fetched <= length
        assert through == text_of(cluster.prefill, prompt)
    assert cluster.router.metric("mooncake_router_decode_only_total") == 0


def test_streams_at_once_and_what_the_prefill_engine_had_cached(cluster: Cluster) -> None:
    prompts = [DOCUMENT[start : start + 500] for start in range(5, 9)]
    # Some blocks of each, and the first token of the next.
    for prompt in prompts:
        answer(cluster.prefill, ask(prompt[: 4 * BLOCK_TOKENS + 1], max_tokens=1))
    with ThreadPoolExecutor(len(prompts)) as threads:
        # Long enough for the prefill engine's answer to be there before they end.
        found = list(threads.map(lambda prompt: streamed(cluster.router, prompt, 100), prompts))
    assert [cached for _, cached in found] == [4 * BLOCK_TOKENS] * len(prompts)
    assert found[0][0] == streamed(cluster.prefill, prompts[0], 100)[0]


def test_a_prompt_no_engine_takes_is_refused_in_the_engines_words(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        answer(cluster.router, ask([*DOCUMENT, *DOCUMENT]))
    assert refused.value.code == 400 and "maximum context length" in refused.value.read().decode()


def test_a_client_that_leaves_frees_both_engines(cluster: Cluster) -> None:
    connection, _ = open_stream(cluster, DOCUMENT[9:500])
    connection.close()
    wait_until(lambda: not cluster.decode.metric("vllm:num_requests_running"))
    wait_until(lambda: not cluster.prefill.metric("vllm:num_requests_running"))
    wait_until(lambda: not cluster.router.metric("mooncake_router_active_requests"))


def test_a_dead_prefill_engine_leaves_the_decode_engine_to_do_it_all(cluster: Cluster) -> None:
    prompt = DOCUMENT[11:700]
    wanted = text_of(cluster.prefill, prompt)
    end_process(cluster.prefill.process)
    assert text_of(cluster.router, prompt) == wanted
    assert cluster.router.metric("mooncake_router_decode_only_total") == 1
    if cluster.protocol == "mooncake":
        # Only there does the router itself know who an engine is: it asks its bootstrap server.
        check_that_it_is_used_again_when_it_is_back(cluster)


def check_that_it_is_used_again_when_it_is_back(cluster: Cluster) -> None:
    cluster.start_prefill()
    before, start = cluster.decode.metric(FETCHED_TOKENS), 13

    def is_used_again() -> bool:
        nonlocal start
        start += 1
        answer(cluster.router, ask(DOCUMENT[start : start + 300], max_tokens=1))
        return cluster.decode.metric(FETCHED_TOKENS) > before

    wait_until(is_used_again)


def test_a_decode_engine_that_dies_in_mid_stream_is_an_error_event(cluster: Cluster) -> None:
    connection, response = open_stream(cluster, DOCUMENT[60:400])
    kill(cluster.decode)
    rest = response.read().decode()
    connection.close()
    assert '"error"' in rest and "[DONE]" not in rest
    with pytest.raises(urllib.error.HTTPError) as failed:
        answer(cluster.router, ask(DOCUMENT[61:400]))
    assert failed.value.code in (502, 503) and '"error"' in failed.value.read().decode()
    wait_until(lambda: not cluster.router.metric("mooncake_router_active_requests"))
