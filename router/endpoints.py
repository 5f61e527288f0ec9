"""Which path is answered by whom."""

import asyncio
import hmac
import itertools
import logging
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from msgspec.structs import replace

from router import admin
from router.core.view import RequestView
from router.dashboard import pages
from router.http.request import Request
from router.http.response import TEXT, Response, error_response, json_response
from router.http.server import ActiveRequest, ClientConnection
from router.instance_spec import RANK_HEADER, Health, read_rank
from router.kv_events.metrics import feed_families, index_families
from router.metrics import exposition
from router.protocols.base import Exchange
from router.request_body import NO_BODY
from router.request_view import GENERATES, BadInput, read_body, read_request_view

if TYPE_CHECKING:
    from router.app import Router

logger = logging.getLogger(__name__)

# Engine endpoints beside /v1/; what controls an engine (/sleep, /abort_request, ...) is not for clients.
_PASSED = frozenset({b"/tokenize", b"/detokenize"})
_GUARDED = frozenset({b"/decisions", pages.DATA_PATH})  # tells of clients' requests
_UNAUTHORIZED = error_response(
    401, "the API key is missing or wrong", headers=b"www-authenticate: Bearer\r\n"
)
_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


def route(router: "Router", client: ClientConnection, request: Request) -> ActiveRequest | None:
    """Begins the answer to one request; None when it is already complete."""
    path = request.path
    if _goes_to_engines(path):
        refusal = _refusal(router, request) or _limit_refusal(router)
        if refusal is None:
            return _forward(router, client, request)
        response = refusal
    elif path in admin.PATHS:
        response = admin.respond(router, client, request)
    else:
        response = _own_refusal(router, request) or _own(router, request)
    if response.status >= 400:
        router.metrics.refusals[response.status] += 1
    client.respond(response)
    return None


def refusal_by_head(router: "Router", client: ClientConnection, head: Request) -> Response | None:
    """What `route` would answer whatever body follows: nobody need send it, and none is kept in vain."""
    if _goes_to_engines(head.path):
        return _refusal(router, head)
    if head.path in admin.PATHS:
        return admin.refusal(router, client, head)
    return _own_refusal(router, head)


def _goes_to_engines(path: bytes) -> bool:
    return path in GENERATES or path in _PASSED or (path.startswith(b"/v1/") and not _climbs(path))


def _own_refusal(router: "Router", request: Request) -> Response | None:
    path, method = request.path, request.method
    if path not in _OWN and not pages.is_ours(path):
        return error_response(404, f"{method.decode()} {path.decode('latin-1')}: there is no such endpoint")
    if method not in (b"GET", b"HEAD"):
        return error_response(405, f"{path.decode()} answers GET", headers=b"allow: GET, HEAD\r\n")
    if path in _GUARDED and not router.authorized(request):
        return _UNAUTHORIZED
    return None


def _own(router: "Router", request: Request) -> Response:
    return pages.respond(router, request) if pages.is_ours(request.path) else _OWN[request.path](router)


def _climbs(path: bytes) -> bool:
    """Whether a server that tidies paths would see another one than under /v1/."""
    if b"." not in path and b"%" not in path:
        return False
    return b".." in unquote_to_bytes(path).replace(b"\\", b"/").split(b"/")


def _refusal(router: "Router", request: Request) -> Response | None:
    method = request.method
    if not router.authorized(request):
        return _UNAUTHORIZED
    if method != b"POST" and (method != b"GET" or request.path in GENERATES):
        allowed = "POST" if request.path in GENERATES else "GET and POST"
        return error_response(405, f"{request.path.decode('latin-1')} answers {allowed}")
    return None


def _limit_refusal(router: "Router") -> Response | None:
    limit = router.config.max_concurrent_requests
    if limit and router.metrics.active_requests >= limit:
        return error_response(
            429, f"the router is at its limit of {limit} requests", headers=b"retry-after: 1\r\n"
        )
    return None


def _forward(router: "Router", client: ClientConnection, request: Request) -> ActiveRequest | None:
    generates = request.path in GENERATES
    request_id = router.ids.next_id()
    try:
        body = read_body(request.body) if generates else NO_BODY
        view = read_request_view(request_id, request, body)
        if RANK_HEADER in request.headers:
            view = _of_rank(router, view, request.headers[RANK_HEADER])
    except BadInput as error:
        router.metrics.refusals[400] += 1
        client.respond(error_response(400, str(error)))
        return None
    kind = router.generation if generates and router.cluster.separates_prefill else Exchange
    exchange = kind(router, client, request, view)
    if router.prompts is not None and generates:
        prompt = router.prompts.read(view, request, body)
        if isinstance(prompt, asyncio.Future):
            prompt.add_done_callback(partial(_prompt_read, exchange))
            return exchange
        exchange.view = prompt
    _start(exchange)
    return exchange


def _of_rank(router: "Router", view: RequestView, text: bytes) -> RequestView:
    """A client that names a data parallel rank gets that one, where ranks are instances. Raises BadInput."""
    num_ranks = router.cluster.num_ranks()
    if num_ranks == 1:
        return view  # the engine's to check
    rank = read_rank(text)
    if not 0 <= rank < num_ranks:
        raise BadInput(
            f"header x-data-parallel-rank: {text.decode('latin-1')!r} is none of the {num_ranks} ranks"
        )
    return replace(view, dp_rank=rank)


def _prompt_read(exchange: Exchange, prompt: "asyncio.Future[RequestView]") -> None:
    if exchange.is_over or prompt.cancelled():
        return  # the client has gone, or the router stops
    if prompt.exception() is None:
        exchange.view = prompt.result()
    else:
        logger.error("a prompt could not be read", exc_info=prompt.exception())
    _start(exchange)


def _start(exchange: Exchange) -> None:
    try:
        exchange.start()
    except Exception:
        # A bug of ours costs this one request, not the router.
        logger.exception("internal error", extra={"request_id": exchange.shown_id})
        if not exchange.is_over:
            exchange.give_up(500, "internal error of the router; its log says more")


def key_is_known(authorization: bytes, keys: tuple[bytes, ...]) -> bool:
    """ "Bearer KEY" with one of the keys; compares in constant time."""
    scheme, _, key = authorization.partition(b" ")
    matches = [hmac.compare_digest(key.strip(), known) for known in keys]
    return scheme.lower() == b"bearer" and any(matches)


def _health(router: "Router") -> Response:
    """Alive. Says nothing of the engines: a router without engines must not be restarted for it."""
    return Response(200, b"", TEXT)


def _ready(router: "Router") -> Response:
    instances = {
        i.url: {
            "role": i.role.value,
            "health": i.health.value,
            "in_flight": i.in_flight,
            "breaker": "closed" if i.breaker.is_closed else "open",
            **({"detail": i.health_detail} if i.health is not Health.UP else {}),
        }
        for i in router.cluster.instances.values()
    }
    ready = router.cluster.is_ready() and not router.draining
    return json_response(
        200 if ready else 503, {"ready": ready, "draining": router.draining, "instances": instances}
    )


def _metrics(router: "Router") -> Response:
    families = router.metrics.families(router.cluster, asyncio.get_running_loop().time())
    of_stores = router.metrics.store_blocks(router.prefetcher.counts, router.copier.counts)
    families = itertools.chain(families, of_stores)
    if router.prompts is not None:
        families = itertools.chain(families, [router.metrics.prompts(router.prompts.counts)])
    if router.index is not None and router.events is not None:
        families = itertools.chain(families, index_families(router.index), feed_families(router.events))
    return Response(200, exposition(families), _METRICS_TYPE)


def _decisions(router: "Router") -> Response:
    return json_response(200, {"decisions": [one.explained() for one in router.decisions.newest_first()]})


_OWN = {b"/health": _health, b"/ready": _ready, b"/metrics": _metrics, b"/decisions": _decisions}
