"""One OpenAI request at a time, with the time of its first token."""

import http.client
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from demo_lib.processes import DemoError

TIMEOUT_S = 300.0


class Request(NamedTuple):
    path: str
    body: dict[str, Any]

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


class Answer(NamedTuple):
    """`ttft_ms` is None for an answer that came in one piece. Times are from sending the request."""

    text: str
    token_ids: list[int]
    prompt_tokens: int
    ttft_ms: float | None
    total_ms: float


def ask(base_url: str, request: Request) -> Answer:
    """DemoError for anything but a complete answer."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    begin = time.perf_counter()
    try:
        connection.request(
            "POST", request.path, json.dumps(request.body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(f"{base_url}{request.path} answered {response.status}: {response.read()[:500]!r}")
        if request.stream:
            return _read_stream(response, begin)
        body = json.load(response)
        total_ms = (time.perf_counter() - begin) * 1e3
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoError(f"{base_url}{request.path}: {error!r}") from error
    finally:
        connection.close()
    choice = body["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(text, choice["token_ids"], body["usage"]["prompt_tokens"], None, total_ms)


def _read_stream(response: http.client.HTTPResponse, begin: float) -> Answer:
    text, prompt_tokens, ttft_ms = "", 0, None
    token_ids: list[int] = []
    for event in _events(response):
        if "error" in event:
            raise DemoError(f"the stream ended with an error: {event['error']}")
        for choice in event["choices"]:
            new_ids = choice.get("token_ids") or []
            if new_ids and ttft_ms is None:
                ttft_ms = (time.perf_counter() - begin) * 1e3
            token_ids += new_ids
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        if event.get("usage"):
            prompt_tokens = event["usage"]["prompt_tokens"]
    return Answer(text, token_ids, prompt_tokens, ttft_ms, (time.perf_counter() - begin) * 1e3)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            data = line[len(b"data: ") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise DemoError("the stream ended without [DONE]")
