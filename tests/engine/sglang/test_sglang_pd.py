"""The router's `sglang` protocol with real engines: prefill and decode apart, meeting in bootstrap rooms.

KV goes through Mooncake's transfer engine over TCP. The tests are in the order of what is left of the cluster
after each.
"""

import contextlib
import json
import os
import signal
import urllib.error
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.disaggregated import COMPLETIONS, Cluster, busy, cluster_of
from tests.engine.sglang.server import FULL_PAGES, PROMPT, wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
# Shorter than a page, some pages and a bit, exactly full pages.
PROMPTS = [[4 + i * step % 250 for i in range(length)] for step, length in ((41, 5), (43, 299), (47, 320))]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, sglang_model: str, shared_store: StoreProcess
) -> Iterator[Cluster]:
    with cluster_of(tmp_path_factory.mktemp("pd"), sglang_model, shared_store) as cluster:
        yield cluster


def ask(prompt: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, **changes}


def through(cluster: Cluster, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(cluster.router.post(path, body)[1])
    return answer


def alone(cluster: Cluster, body: dict[str, Any], path: str = COMPLETIONS) -> dict[str, Any]:
    status, text = cluster.alone.ask("POST", path, body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


def streamed(cluster: Cluster, body: dict[str, Any]) -> tuple[str, int]:
    """(text, cached tokens)"""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    _, text = cluster.router.post(COMPLETIONS, body)
    *events, done = text.removeprefix("data: ").rstrip().split("\n\ndata: ")
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len(chunks) > 2
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(pieces), chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_answers_are_those_of_one_engine(cluster: Cluster) -> None:
    asked = [(COMPLETIONS, ask(prompt, logprobs=1)) for prompt in PROMPTS]
    asked.append((COMPLETIONS, ask(PROMPTS[1:])))
    asked.append((CHAT, ask(None, messages=[{"role": "user", "content": "Tell me of the sea."}])))
    for path, body in asked:
        wanted, found = alone(cluster, body, path), through(cluster, body, path)
        assert found["choices"] == wanted["choices"]
        assert found["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
    # Every one of them took both kinds of engine. Prefill's own answer may come after the one passed on.
    for role in ("prefill", "decode"):
        label = f'mooncake_router_legs_total{{outcome="2xx",role="{role}"'
        wait_until(
            lambda label=label: cluster.router.metric(label) == len(asked),
            lambda: cluster.router.get("/metrics"),
        )


def test_streams_at_once_and_what_the_prefill_engine_had_cached(cluster: Cluster) -> None:
    prompts = [[4 + (i + j * 53) % 250 for j in range(256)] for i in range(4)]
    wanted = [alone(cluster, ask(prompt))["choices"][0]["text"] for prompt in prompts]
    for num_cached in (0, 256 - 16):
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: streamed(cluster, ask(prompt)), prompts))
        assert answers == [(text, num_cached) for text in wanted]


def test_a_prefill_engine_takes_pages_from_the_store(cluster: Cluster) -> None:
    wanted = alone(cluster, ask(PROMPT))
    assert through(cluster, ask(PROMPT))["choices"] == wanted["choices"]
    cluster.prefill.wait_saved()
    cluster.prefill.flush()
    found = through(cluster, ask(PROMPT))
    assert found["choices"] == wanted["choices"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL_PAGES


def test_a_prompt_no_engine_takes_is_refused_in_the_engines_words(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        through(cluster, ask(PROMPT * 20))
    assert refused.value.code == 400 and "context length" in refused.value.read().decode()


def test_samples_that_would_never_end_are_refused(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        through(cluster, ask(PROMPTS[0], n=2))
    assert refused.value.code == 400 and "send 2 requests" in refused.value.read().decode()


def test_a_client_that_leaves_frees_both_engines(cluster: Cluster) -> None:
    connection, _ = cluster.open_stream(ask(PROMPTS[1], max_tokens=1700, stream=True))
    engine = cluster.decoding()
    wait_until(lambda: bool(busy(engine)), engine.log_tail)
    connection.close()
    wait_until(lambda: not busy(engine) and not busy(cluster.prefill), lambda: str(busy(engine)))
    cluster.wait_nothing_in_flight(engine, cluster.prefill)


def test_a_dead_decode_engine_is_an_error_event_and_then_another_engine(cluster: Cluster) -> None:
    connection, response = cluster.open_stream(ask(PROMPTS[2], max_tokens=1700, stream=True))
    dead = cluster.decoding()
    (living,) = (engine for engine in cluster.decodes if engine is not dead)
    # Frozen, so that it is sure to have a request that it has not begun to answer.
    os.killpg(dead.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(2) as threads:
        answers: list[tuple[list[int], Future[dict[str, Any]]]] = []

        def one_waits() -> bool:
            """The living one may be so fast that it gets both."""
            if all(answer.done() for _, answer in answers):
                answers.extend(
                    (prompt, threads.submit(through, cluster, ask(prompt))) for prompt in PROMPTS[:2]
                )
            return cluster.in_flight(dead) == 2

        wait_until(one_waits, dead.log_tail)
        os.killpg(dead.process.pid, signal.SIGKILL)
        rest = response.read().decode()
        connection.close()
        assert '"error"' in rest and "[DONE]" not in rest
        for prompt, answer in answers:
            assert answer.result()["choices"] == alone(cluster, ask(prompt))["choices"]
    assert cluster.router.metric('mooncake_router_retries_total{leg="answer",reason="lost"}') == 1
    # The prefill engine has computed for the dead one too.
    for engine in (cluster.prefill, living):
        wait_until(lambda engine=engine: not busy(engine), lambda engine=engine: str(busy(engine)))


def test_without_its_prefill_engine_a_request_ends_in_an_error_until_it_is_back(cluster: Cluster) -> None:
    os.killpg(cluster.prefill.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as failed:
            through(cluster, ask(PROMPTS[1]))
        assert failed.value.code in (502, 503) and "prefill engine" in failed.value.read().decode()
    wait_until(
        lambda: cluster.router.metric("mooncake_router_active_requests") == 0,
        lambda: cluster.router.get("/metrics"),
    )
    cluster.wait_nothing_in_flight(cluster.prefill, *cluster.decodes)
    (living,) = (engine for engine in cluster.decodes if engine.process.poll() is None)
    wait_until(lambda: not busy(living), lambda: str(busy(living)))

    prefill = cluster.start_prefill().wait_ready()
    found: dict[str, Any] = {}

    def is_served() -> bool:
        with contextlib.suppress(urllib.error.HTTPError):
            found.update(through(cluster, ask(PROMPT)))
        return bool(found)

    wait_until(is_served, prefill.log_tail)
    assert found["choices"] == alone(cluster, ask(PROMPT))["choices"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == FULL_PAGES, "from the store"
