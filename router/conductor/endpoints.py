"""POST /register, /unregister, /query and /query_by_hash, as Mooncake documents them for its Conductor
(docs/source/design/conductor/indexer-api-design.md)."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from kvcore.errors import ConfigError
from router.conductor.service import MAX_PUBLISHERS, TooMany
from router.core.conductor_index import Held, Publisher, Scope
from router.http.request import Request
from router.http.response import Response, error_response, json_response
from router.kv_events.source import parse_event_source

if TYPE_CHECKING:
    from router.app import Router

_BlockSize = Annotated[int, Meta(gt=0, le=1 << 20)]


class _Unregister(msgspec.Struct, frozen=True):
    instance_id: str
    dp_rank: int
    tenant_id: str = "default"


class _Register(msgspec.Struct, frozen=True):
    endpoint: str
    type: str
    modelname: str
    instance_id: str
    block_size: _BlockSize
    dp_rank: int
    replay_endpoint: str | None = None
    lora_name: str | None = None
    tenant_id: str = "default"
    additionalsalt: str | None = None


class _Query(msgspec.Struct, frozen=True):
    model: str
    token_ids: list[int]
    block_size: _BlockSize
    lora_name: str | None = None
    tenant_id: str = "default"
    instance_id: str | None = None
    cache_salt: str | None = None


class _QueryByHash(msgspec.Struct, frozen=True):
    """`block_hash`: what earlier drafts called `seq_hashes`."""

    model: str
    block_size: _BlockSize
    seq_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    lora_name: str | None = None
    tenant_id: str = "default"
    instance_id: str | None = None
    cache_salt: str | None = None


def register(router: "Router", request: Request) -> Response:
    try:
        asked = msgspec.json.decode(request.body, type=_Register)
        source = parse_event_source(",".join(filter(None, (asked.endpoint, asked.replay_endpoint))))
        scope = Scope(
            asked.modelname,
            asked.lora_name or "",
            asked.tenant_id,
            asked.block_size,
            asked.additionalsalt or "",
        )
        router.conductor.register(Publisher(asked.instance_id, asked.dp_rank, scope), source)
    except (msgspec.DecodeError, ConfigError) as error:
        return error_response(400, f"/register: {error}")
    except TooMany:
        return error_response(429, f"/register: there are {MAX_PUBLISHERS} publishers already")
    return json_response(200, {"status": "registered successfully", "instance_id": asked.instance_id})


def unregister(router: "Router", request: Request) -> Response:
    try:
        asked = msgspec.json.decode(request.body, type=_Unregister)
    except msgspec.DecodeError as error:
        return error_response(400, f"/unregister: {error}")
    key = f"{asked.instance_id}|{asked.tenant_id}|{asked.dp_rank}"
    if not router.conductor.unregister(key):
        return error_response(404, f"/unregister: {key} is not registered")
    return json_response(200, {"status": "unregistered successfully", "removed_instances": [key]})


def query(router: "Router", request: Request) -> Response:
    try:
        asked = msgspec.json.decode(request.body, type=_Query)
        now = asyncio.get_running_loop().time()
        held = router.conductor.index.query(_scope(asked), asked.token_ids, now)
    except msgspec.DecodeError as error:
        return error_response(400, f"/query: {error}")
    except OverflowError:
        return error_response(400, "/query: token_ids are numbers from 0 to 4294967295")
    return _answer(asked, held)


def query_by_hash(router: "Router", request: Request) -> Response:
    try:
        asked = msgspec.json.decode(request.body, type=_QueryByHash)
    except msgspec.DecodeError as error:
        return error_response(400, f"/query_by_hash: {error}")
    hashes = asked.seq_hashes if asked.seq_hashes is not None else asked.block_hash
    if hashes is None:
        return error_response(400, "/query_by_hash: seq_hashes is missing")
    now = asyncio.get_running_loop().time()
    return _answer(asked, router.conductor.index.query_by_hash(_scope(asked), hashes, now))


def _scope(asked: _Query | _QueryByHash) -> Scope:
    return Scope(
        asked.model, asked.lora_name or "", asked.tenant_id, asked.block_size, asked.cache_salt or ""
    )


def _answer(asked: _Query | _QueryByHash, held: dict[str, Held]) -> Response:
    instances: dict[str, Any] = {}
    for instance_id, found in held.items():
        if asked.instance_id in (None, instance_id):
            media = {name: tokens for name, tokens in found.by_medium.items() if tokens or name != "EXTERNAL"}
            instances[instance_id] = {"longest_matched": found.longest_matched, **media, "DP": found.by_rank}
    return json_response(200, {asked.tenant_id: instances})
