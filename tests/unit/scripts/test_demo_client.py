"""The demo's OpenAI client against a server that says exactly what a test tells it to."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from demo_lib.openai_client import Answer, Request, ask
from demo_lib.processes import DemoError

Serve = Callable[[int, bytes], str]
USAGE = {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """serve(status, body) starts a server that answers every POST so, and returns its URL."""
    servers: list[http.server.HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Silence: the test's output is its own."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(*chunks: dict[str, Any], end: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + end


def test_streamed_chat_is_put_together(serve: Serve) -> None:
    body = events(
        {"choices": [{"delta": {"role": "assistant", "content": ""}, "token_ids": None}]},
        {"choices": [{"delta": {"content": "Hel"}, "token_ids": [5]}]},
        {"choices": [{"delta": {"content": "lo"}, "token_ids": [6, 7]}]},
        {"choices": [], "usage": USAGE},
    )
    answer = ask(serve(200, body), Request("/v1/chat/completions", {"stream": True}))
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == ("Hello", [5, 6, 7], 3)
    assert answer.ttft_ms is not None
    assert 0 < answer.ttft_ms <= answer.total_ms


@pytest.mark.parametrize("choice", [{"text": "Hi"}, {"message": {"content": "Hi"}}])
def test_answer_in_one_piece(serve: Serve, choice: dict[str, Any]) -> None:
    body = json.dumps({"choices": [{**choice, "token_ids": [9]}], "usage": USAGE}).encode()
    answer = ask(serve(200, body), Request("/v1/completions", {}))
    assert answer == Answer("Hi", [9], 3, None, answer.total_ms)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (429, b'{"error": "busy"}', "answered 429"),
        (200, events({"error": {"message": "lost"}}), "lost"),
        (200, events({"choices": []}, end=b""), "without \\[DONE\\]"),
        (200, b"data: {nonsense\n\n", "nonsense|Expecting"),
    ],
)
def test_anything_less_than_an_answer_is_an_error(serve: Serve, status: int, body: bytes, said: str) -> None:
    with pytest.raises(DemoError, match=said):
        ask(serve(status, body), Request("/v1/completions", {"stream": True}))
