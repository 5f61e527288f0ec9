"""Requests to replay, and the files they come from.

Three formats, told apart by what is in them:
- Mooncake JSONL (FAST '25 traces): timestamp (ms), input_length, output_length (tokens), hash_ids, one for
  each block of `block_size_tokens`; an id stands for its block and all before it.
- lengths without prefixes: CSV or JSONL with an arrival, a prompt and an output length under any of the
  names in use (Azure's TIMESTAMP,ContextTokens,GeneratedTokens; vidur's num_prefill_tokens, ...). Nothing
  is shared.
- files named *.record: decisions recorded by a router (kvsim.recorded).
"""

from __future__ import annotations

import csv
import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import ConfigError

DEFAULT_BLOCK_SIZE_TOKENS = 512

_ARRIVALS_MS = ("timestamp", "timestamp_ms", "arrival_ms")
_ARRIVALS_S = ("arrived_at", "arrival_s", "arrival_time", "timestamp_s", "time_s")
_CLOCK_TIMES = ("TIMESTAMP",)
_PROMPTS = ("input_length", "prompt_tokens", "ContextTokens", "num_prefill_tokens", "input_tokens")
_OUTPUTS = ("output_length", "output_tokens", "GeneratedTokens", "num_decode_tokens", "completion_tokens")


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """`at` in seconds since the trace's begin. `hash_ids`: one for each block, the last maybe partial; empty
    when the prompt shares nothing with anybody."""

    at: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: Sequence[int] = ()
    tenant: str = "default"
    session_id: str = ""
    priority: int = 0


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival."""

    name: str
    requests: Sequence[TraceRequest]
    block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS

    @property
    def duration_s(self) -> float:
        return self.requests[-1].at - self.requests[0].at if self.requests else 0.0

    @property
    def num_blocks(self) -> int:
        return sum(len(request.hash_ids) for request in self.requests)

    @property
    def num_distinct_blocks(self) -> int:
        return len({hash_id for request in self.requests for hash_id in request.hash_ids})


def read_trace(path: Path, block_size_tokens: int = DEFAULT_BLOCK_SIZE_TOKENS) -> Trace:
    """ConfigError naming the file, the line and what it lacks."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = csv.DictReader(lines) if path.suffix == ".csv" else _json_rows(path, lines)
            requests = list(_requests(path, rows, block_size_tokens))
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: is not text ({error.reason})") from error
    if not requests:
        raise ConfigError(f"trace {path}: holds no requests")
    requests.sort(key=lambda request: request.at)
    begin = requests[0].at
    if begin:
        requests = [msgspec.structs.replace(request, at=request.at - begin) for request in requests]
    return Trace(path.stem, requests, block_size_tokens)


def _json_rows(path: Path, lines: Iterator[str]) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"trace {path}, line {number}: is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"trace {path}, line {number}: one JSON object a line is expected")
        yield row


def _requests(path: Path, rows: Iterator[Any], block_size_tokens: int) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows, start=1):
        try:
            yield _request(row, block_size_tokens)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"trace {path}, request {number}: {error}") from error


def _request(row: Mapping[str, Any], block_size_tokens: int) -> TraceRequest:
    prompt_tokens = _integer(_first(row, _PROMPTS, "a prompt length"), "a prompt length")
    output_tokens = _integer(_first(row, _OUTPUTS, "an output length"), "an output length")
    if prompt_tokens < 1 or output_tokens < 0:
        raise ValueError(f"lengths of {prompt_tokens} and {output_tokens} tokens make no request")
    hash_ids = row.get("hash_ids") or []
    if not isinstance(hash_ids, list) or not all(type(i) is int and 0 <= i < 2**64 for i in hash_ids):
        raise ValueError("hash_ids is a list of integers from 0 to 2^64 - 1, one a block")
    expected = -(-prompt_tokens // block_size_tokens)
    if hash_ids and len(hash_ids) != expected:
        raise ValueError(
            f"{len(hash_ids)} hash_ids for {prompt_tokens} tokens; blocks of {block_size_tokens} tokens make "
            f"{expected} (is block_size_tokens right?)"
        )
    return TraceRequest(
        _arrival_s(row),
        prompt_tokens,
        max(output_tokens, 1),
        tuple(hash_ids),
        str(row.get("tenant", "default")),
        str(row.get("session_id", "")),
        _integer(row.get("priority", 0), "a priority"),
    )


def _arrival_s(row: Mapping[str, Any]) -> float:
    for name in _CLOCK_TIMES:
        if name in row:
            # Azure writes seven digits of a second's fraction; Python reads six.
            text = str(row[name])
            head, _, fraction = text.partition(".")
            try:
                moment = datetime.datetime.fromisoformat(head).replace(tzinfo=datetime.timezone.utc)
                return moment.timestamp() + (float(f"0.{fraction[:6]}") if fraction else 0.0)
            except ValueError:
                raise ValueError(f"{name} is {text!r}, not a time such as 2023-11-16 18:17:03.97") from None
    for name in _ARRIVALS_S:
        if name in row:
            return _number(row[name], "an arrival time")
    return _number(_first(row, _ARRIVALS_MS, "an arrival time"), "an arrival time") / 1e3


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} of {value!r} is no number")
    return number


def _integer(value: Any, what: str) -> int:
    number = _number(value, what)
    if not number.is_integer():
        raise ValueError(f"{what} of {value!r} is no whole number")
    return int(number)


def _first(row: Mapping[str, Any], names: Sequence[str], what: str) -> Any:
    for name in names:
        if row.get(name) not in (None, ""):
            return row[name]
    raise ValueError(f"{what} is missing (one of {', '.join(names)})")
