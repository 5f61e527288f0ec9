"""What operators and other programs POST to the router itself."""

import ipaddress
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError
from router.conductor import endpoints as conductor
from router.http.request import Request
from router.http.response import Response, error_response, json_response
from router.http.server import ClientConnection

if TYPE_CHECKING:
    from router.app import Router

logger = logging.getLogger(__name__)


def respond(router: "Router", client: ClientConnection, request: Request) -> Response:
    """The answer to one of PATHS."""
    refused = refusal(router, client, request)
    if refused is not None:
        return refused
    try:
        return PATHS[request.path](router, request)
    except Exception:
        # A bug of ours costs this one request, not the router.
        logger.exception("internal error", extra={"path": request.path.decode()})
        return error_response(500, "internal error of the router; its log says more")


def refusal(router: "Router", client: ClientConnection, request: Request) -> Response | None:
    """By its head. Without API keys only clients on the router's own host are listened to."""
    if request.method != b"POST":
        return error_response(405, f"{request.path.decode()} answers POST", headers=b"allow: POST\r\n")
    if router.config.api_keys:
        if not router.authorized(request):
            return error_response(
                401, "the API key is missing or wrong", headers=b"www-authenticate: Bearer\r\n"
            )
    elif not is_local(client.transport.get_extra_info("peername")):
        return error_response(403, "without --api-key only clients on the router's host may ask for this")
    return None


def is_local(peer: object) -> bool:
    """Whether a socket's peer name is a loopback address."""
    if not isinstance(peer, tuple) or not peer:
        return False
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _reload(router: "Router", request: Request) -> Response:
    try:
        return json_response(200, {"changed": router.reload()})
    except ConfigError as error:
        logger.error("the configuration stays as it was: %s", error)
        return error_response(409, f"the configuration stays as it was: {error}", code="not_reloaded")


PATHS: dict[bytes, Callable[["Router", Request], Response]] = {
    b"/reload": _reload,
    b"/register": conductor.register,
    b"/unregister": conductor.unregister,
    b"/query": conductor.query,
    b"/query_by_hash": conductor.query_by_hash,
}
