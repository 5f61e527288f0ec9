"""The engine stand-in of scripts/bench router answers as vLLM does, so that routers do before it what they do
before vLLM: each answer is held beside that of a real one, with and without --enable-scale-out."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.rig import ROOT, free_port
from tests.engine.served import Server, ended, vllm_server

pytestmark = pytest.mark.engine

MODEL = "tiny"
CHAT = {"messages": [{"role": "user", "content": "hello you"}], "max_tokens": 3}
TEXT = {"prompt": "hello you", "max_tokens": 3}
TEXTS = {"prompt": ["hello", "you"], "max_tokens": 3}
IDS = {"prompt": [5, 6, 7], "max_tokens": 3}
GETS = ["/health", "/version", "/load", "/v1/models", "/kv_event_sources"]
QUESTIONS: list[tuple[str, Any]] = [
    *((path, None) for path in (*GETS, "/server_info", "/get_model_info", "/tokenize")),
    *(("/tokenize", body) for body in (CHAT, TEXT, {}, "nothing")),
    *(("/v1/chat/completions/render", body) for body in (CHAT, {}, "nothing", None)),
    *(("/v1/completions/render", body) for body in (TEXT, TEXTS, IDS)),
    *((path, CHAT) for path in ("/nowhere", "/v1/models", "/get_server_info")),
    ("/v1/completions", "nothing"),
]
Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def pairs(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, Pair]]:
    """(real, stand-in), by whether prompts are rendered."""
    folder = tmp_path_factory.mktemp("stand-in")
    made = {}
    for renders in (False, True):
        real_flags = ["--enable-scale-out"] if renders else []
        real = vllm_server(model, None, folder / f"vllm-{renders}.log", flags=real_flags)
        port = free_port()
        command = [sys.executable, str(ROOT / "benchmarks" / "router_engine.py"), "--port", str(port)]
        flags = ["--scale-out"] if renders else []
        made[renders] = (real, Server([*command, *flags], port, folder / f"stand-in-{renders}.log", {}))
    with ended(*made[False], *made[True]):
        for pair in made.values():
            for server in pair:
                server.wait("/health")
        yield made


def ask(server: Server, path: str, body: Any, model: str) -> tuple[int, str]:
    if isinstance(body, dict):
        body = json.dumps({"model": model, **body})
    data = None if body is None else body.encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def shape(value: Any) -> Any:
    """Names and types, without the values; None where one is null."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return None if value is None else type(value).__name__


@pytest.mark.parametrize("renders", [False, True])
@pytest.mark.parametrize(("path", "body"), QUESTIONS)
def test_answers_have_the_same_status_and_shape(
    pairs: dict[bool, Pair], path: str, body: Any, renders: bool
) -> None:
    real, stand_in = pairs[renders]
    expected_status, expected = ask(real, path, body, MODEL)
    status, found = ask(stand_in, path, body, "mock")
    assert status == expected_status
    shapes: list[Any] = [shape(json.loads(text)) if text else None for text in (expected, found)]
    expected_shape, found_shape = shapes
    if isinstance(expected_shape, dict) and "error" in expected_shape:
        # Which field is wrong is said where vLLM can tell.
        assert expected_shape["error"].keys() == found_shape["error"].keys()
    else:
        assert found_shape == expected_shape


def test_gauges_are_among_vllms(pairs: dict[bool, Pair]) -> None:
    real, stand_in = pairs[False]
    names = [line.split("{")[0] for line in stand_in.get("/metrics").splitlines() if line[0] != "#"]
    assert len(names) == 3
    for name in names:
        assert f"\n{name}{{" in real.get("/metrics")


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_no_field_that_vllms_lack(
    pairs: dict[bool, Pair], path: str, body: Any, stream: bool
) -> None:
    real, stand_in = pairs[False]
    (_, expected), (_, found) = (
        ask(server, path, {**body, "stream": stream}, name)
        for server, name in ((real, MODEL), (stand_in, "mock"))
    )
    if stream:
        assert found.endswith("data: [DONE]\n\n") and expected.endswith("data: [DONE]\n\n")
        # The first of a chat says who speaks, without text.
        expected, found = (text.split("\n\n")[1].removeprefix("data: ") for text in (expected, found))
    assert is_within(json.loads(found), json.loads(expected))


def is_within(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        return all(name in expected and is_within(item, expected[name]) for name, item in found.items())
    if isinstance(found, list):
        return is_within(found[0], expected[0])
    return found is None or expected is None or type(found) is type(expected)
