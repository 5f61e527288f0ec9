"""What `vllm serve` 0.32.0 answers, for the stand-in engine. Pure; a test holds it beside a real one.

Routers ask an engine for more than completions: vllm-router's cache_aware has each prompt turned into token
ids by POST /v1/.../render, or by POST /tokenize where that is not found. vLLM 0.28 renders, 0.32 refuses
with 403 unless started with --enable-scale-out. sglang-router asks for four paths of SGLang's when it starts,
which are not found here; it routes the same when they are.
"""

import http
from typing import Any

import msgspec
import numpy

MODEL = "mock"
VOCABULARY_SIZE = 128_000
MAX_MODEL_LEN = 131_072
CALLS_PATH = b"/stand-in/calls"  # the only one no vLLM has: how often each path was asked for
CHAT = b"/v1/chat/completions"
COMPLETION = b"/v1/completions"
_BYTES_A_TOKEN = 4
_CREATED = 1_700_000_000


class Message(msgspec.Struct):
    role: str = ""
    content: str = ""


class Prompted(msgspec.Struct):
    """What of a request is turned into token ids."""

    messages: list[Message] | None = None
    prompt: str | list[str | int] | None = None
    max_tokens: int | None = None
    stream: bool = False


def token_ids(text: bytes) -> list[int]:
    """About one for 4 bytes; texts that begin alike give ids that do."""
    padded = text + bytes(-len(text) % _BYTES_A_TOKEN)
    ids: list[int] = (numpy.frombuffer(padded, "<u4") % VOCABULARY_SIZE).tolist()
    return ids


def response(status: int, body: bytes, content_type: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        http.HTTPStatus(status).phrase.encode(),
        content_type,
        len(body),
        body,
    )


def _json(document: object, status: int = 200) -> bytes:
    return response(status, msgspec.json.encode(document))


def error(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def answer(
    method: bytes, path: bytes, body: bytes, *, scale_out: bool = False, num_running: int = 0
) -> bytes:
    """To anything but a completion, head and all. `scale_out`: as with --enable-scale-out."""
    if path in _GET:
        return _GET[path] if method == b"GET" else _METHOD_NOT_ALLOWED
    if path == b"/metrics":
        return response(200, _METRICS % num_running, b"text/plain; version=1.0.0; charset=utf-8")
    if path not in (b"/tokenize", CHAT + b"/render", COMPLETION + b"/render", CHAT, COMPLETION):
        return _NOT_FOUND
    if method != b"POST":
        return _METHOD_NOT_ALLOWED
    if path.endswith(b"/render") and not scale_out:
        return _FORBIDDEN
    try:
        request = _DECODER.decode(body)
    except msgspec.DecodeError as reason:
        return error(400, "Bad Request", str(reason), "body")
    prompts = _prompts(request)
    if not prompts:
        return error(400, "Bad Request", "neither messages nor a prompt", "body")
    if path == b"/tokenize":
        (ids, *_) = prompts
        return _json({"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None})
    if path.startswith(CHAT):
        return _json(_rendered("chatcmpl-0123456789abcdef", prompts[0], request))
    return _json([_rendered(f"cmpl-0123456789abcdef-{n}", ids, request) for n, ids in enumerate(prompts)])


def _prompts(request: Prompted) -> list[list[int]]:
    if request.messages is not None:
        turns = [f"<|im_start|>{turn.role}\n{turn.content}<|im_end|>\n" for turn in request.messages]
        return [token_ids("".join([*turns, "<|im_start|>assistant\n"]).encode())]
    if isinstance(request.prompt, str):
        return [token_ids(request.prompt.encode())]
    texts = [item for item in request.prompt or () if isinstance(item, str)]
    if texts:
        return [token_ids(text.encode()) for text in texts]
    ids = [item for item in request.prompt or () if isinstance(item, int)]
    return [ids] if ids else []


def _rendered(request_id: str, ids: list[int], request: Prompted) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "token_ids": ids,
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": {
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "stop": [],
            "stop_token_ids": [],
            "max_tokens": request.max_tokens,
            "output_kind": 2,
            "skip_clone": True,
            "bad_words": [],
            "skip_reading_prefix_cache": False,
        },
        "model": MODEL,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": request.stream,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _model_card() -> dict[str, Any]:
    permission = {
        "id": "modelperm-0123456789abcdef",
        "object": "model_permission",
        "created": _CREATED,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": MODEL,
        "object": "model",
        "created": _CREATED,
        "owned_by": "vllm",
        "root": MODEL,
        "parent": None,
        "max_model_len": MAX_MODEL_LEN,
        "permission": [permission],
    }


_DECODER = msgspec.json.Decoder(Prompted)
_NOT_FOUND = _json({"detail": "Not Found"}, 404)
_METHOD_NOT_ALLOWED = _json({"detail": "Method Not Allowed"}, 405)
_FORBIDDEN = error(
    403,
    "PermissionDeniedError",
    "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
)
_GET = {
    b"/health": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"/version": _json({"version": "0.32.0"}),
    b"/load": _json({"server_load": 0}),  # it counts with --enable-server-load-tracking only
    b"/kv_event_sources": _json({}),
    b"/v1/models": _json({"object": "list", "data": [_model_card()]}),
}
_METRICS = b"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="mock"} %d.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="mock"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="mock"} 0.0
"""
