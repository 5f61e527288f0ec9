"""What the stand-in engine answers, beside what was seen of vLLM 0.32.0 (tests/engine asks a real one)."""

import json
from typing import Any

import pytest
from routerbench.engine_api import MODEL, VOCABULARY_SIZE, answer, token_ids

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello you"}], "max_tokens": 8}


def ask(method: str, path: str, body: object = None, *, scale_out: bool = False) -> tuple[int, Any]:
    raw = b"" if body is None else json.dumps(body).encode()
    head, _, content = answer(method.encode(), path.encode(), raw, scale_out=scale_out).partition(b"\r\n\r\n")
    assert int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) == len(content)
    is_json = b"content-type: application/json" in head
    return int(head.split(b" ")[1]), json.loads(content) if is_json else content.decode()


def test_what_is_there() -> None:
    assert ask("GET", "/health") == (200, "")
    assert ask("GET", "/version") == (200, {"version": "0.32.0"})
    assert ask("GET", "/load") == (200, {"server_load": 0})
    assert ask("GET", "/v1/models")[1]["data"][0]["id"] == MODEL
    assert 'vllm:num_requests_running{engine="0",model_name="mock"} 0.0' in ask("GET", "/metrics")[1]


def test_the_gauge_tells_how_many_run() -> None:
    assert b'vllm:num_requests_running{engine="0",model_name="mock"} 7.0' in answer(
        b"GET", b"/metrics", b"", num_running=7
    )


@pytest.mark.parametrize("path", ["/server_info", "/get_model_info", "/render", "/"])
def test_what_is_not_there(path: str) -> None:
    assert ask("GET", path) == (404, {"detail": "Not Found"})
    assert ask("POST", path, CHAT) == (404, {"detail": "Not Found"})


def test_the_wrong_method() -> None:
    for method, path in (("GET", "/tokenize"), ("POST", "/v1/models"), ("GET", "/v1/completions/render")):
        assert ask(method, path) == (405, {"detail": "Method Not Allowed"})


def test_tokenize() -> None:
    status, found = ask("POST", "/tokenize", CHAT)
    assert status == 200 and list(found) == ["count", "max_model_len", "tokens", "token_strs"]
    assert found["count"] == len(found["tokens"]) > 0
    assert ask("POST", "/tokenize", {"prompt": "hello you"})[1]["tokens"] == token_ids(b"hello you")


def test_render_is_refused_by_default() -> None:
    for path in ("/v1/chat/completions/render", "/v1/completions/render"):
        status, found = ask("POST", path, CHAT)
        assert status == 403
        assert found["error"]["type"] == "PermissionDeniedError" and found["error"]["code"] == 403
        assert "--enable-scale-out" in found["error"]["message"]


def test_render_of_a_chat() -> None:
    status, found = ask("POST", "/v1/chat/completions/render", CHAT, scale_out=True)
    assert status == 200 and found["model"] == MODEL
    assert found["token_ids"] == ask("POST", "/tokenize", CHAT)[1]["tokens"]
    assert found["sampling_params"]["max_tokens"] == 8
    assert {"request_id", "features", "stream", "cache_salt", "priority", "output_mode"} <= set(found)


def test_render_of_prompts_is_a_list() -> None:
    def rendered(prompt: object) -> list[list[int]]:
        found = ask("POST", "/v1/completions/render", {"model": MODEL, "prompt": prompt}, scale_out=True)[1]
        return [one["token_ids"] for one in found]

    assert rendered("hello") == [token_ids(b"hello")]
    assert rendered(["hello", "you"]) == [token_ids(b"hello"), token_ids(b"you")]
    assert rendered([5, 6, 7]) == [[5, 6, 7]]


@pytest.mark.parametrize("body", [{"model": MODEL}, {"model": MODEL, "messages": 3}, []])
def test_bad_requests(body: object) -> None:
    status, found = ask("POST", "/tokenize", body)
    assert status == 400 and found["error"]["type"] == "Bad Request" and found["error"]["code"] == 400


def test_texts_that_begin_alike_have_ids_that_do() -> None:
    one, other = (token_ids(b"abcd" * 1000 + end) for end in (b"one end", b"another"))
    assert one[:1000] == other[:1000] and one != other
    assert len(one) == 1002 and max(one) < VOCABULARY_SIZE and len(set(token_ids(bytes(range(250))))) > 60
