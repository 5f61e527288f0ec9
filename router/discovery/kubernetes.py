"""Engines behind Services of Kubernetes: list the EndpointSlices, then watch them.

The router's service account needs `get`, `list` and `watch` of endpointslices in the group discovery.k8s.io.
Its token is read anew for each request: Kubernetes replaces it while the pod runs.
"""

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path

import aiohttp
import msgspec

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.discovery.endpoint_slices import SERVICE_LABEL, EndpointSlice, SliceList, WatchEvent, entries
from router.instance import InstanceSpec

logger = logging.getLogger(__name__)

# The API server ends a watch after this; it is then begun again. Longer silence is a dead connection.
_WATCH_S = 300
_SILENCE_S = 330.0
_LIST_TIMEOUT_S = 30.0

_LIST = msgspec.json.Decoder(SliceList)
_EVENT = msgspec.json.Decoder(WatchEvent)
_SLICE = msgspec.json.Decoder(EndpointSlice)


class _StartAgain(Exception):
    """The watch cannot go on from where it was: list anew."""


class KubernetesDiscovery:
    def __init__(self, config: DiscoveryConfig) -> None:
        """ConfigError outside of a cluster, when no API server is named."""
        self._credentials = Path(config.kubernetes_credentials)
        self._api = config.kubernetes_api.rstrip("/") or _api_of_cluster()
        self._port = config.kubernetes_port
        self._retry_s = config.interval_ms / 1e3
        services = {
            config.kubernetes_service: Role.MIXED,
            config.kubernetes_prefill_service: Role.PREFILL,
            config.kubernetes_decode_service: Role.DECODE,
        }
        self._roles = {name: role for name, role in services.items() if name}
        namespace = config.kubernetes_namespace or self._own_namespace()
        self._url = f"{self._api}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        last: list[EngineEntry] | None = None
        is_reached = True
        while True:
            try:
                async with self._session() as session, aclosing(self._follow(session)) as changes:
                    async for _ in changes:
                        is_reached = True
                        found = entries(self._slices.values(), self._roles, self._port)
                        if found != last:
                            last = found
                            yield checked(found)
            except _StartAgain as reason:
                logger.info("the list of EndpointSlices is read anew: %s", reason)
                continue
            except (
                aiohttp.ClientError,
                OSError,
                asyncio.TimeoutError,
                msgspec.DecodeError,
                ConfigError,
            ) as error:
                if is_reached:
                    logger.warning("Kubernetes cannot be asked for engines; the last ones stay: %s", error)
                is_reached = False
            if last is None:
                last = []
                yield ()
            await asyncio.sleep(self._retry_s)

    async def _follow(self, session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
        """Yields after each change of `_slices`; returns when a watch ended as it should."""
        selector = f"{SERVICE_LABEL} in ({','.join(sorted(self._roles))})"
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        async with session.get(
            self._url, params={"labelSelector": selector}, headers=self._head(), timeout=timeout
        ) as answer:
            answer.raise_for_status()
            listed = _LIST.decode(await answer.read())
        self._slices = {one.metadata.name: one for one in listed.items}
        self._version = listed.metadata.resourceVersion
        yield None
        while True:
            params = {
                "labelSelector": selector,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(_WATCH_S),
                "resourceVersion": self._version,
            }
            silence = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
            async with session.get(self._url, params=params, headers=self._head(), timeout=silence) as answer:
                if answer.status == 410:
                    raise _StartAgain("the version to watch from is gone")
                answer.raise_for_status()
                async for line in _lines(answer.content):
                    if self._apply(_EVENT.decode(line)):
                        yield None

    def _apply(self, event: WatchEvent) -> bool:
        """Whether the engines may have changed."""
        if event.type == "ERROR":  # a Status; mostly 410: too old a version
            raise _StartAgain(bytes(event.object).decode(errors="replace"))
        one = _SLICE.decode(event.object)
        self._version = one.metadata.resourceVersion
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
        return True

    def _session(self) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = True
        ca = self._credentials / "ca.crt"
        if self._api.startswith("https:") and ca.exists():
            context = ssl.create_default_context(cafile=str(ca))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=2))

    def _head(self) -> dict[str, str]:
        try:
            token = (self._credentials / "token").read_text().strip()
        except OSError:
            return {}  # an API server that asks for none, such as kubectl proxy
        return {"authorization": f"Bearer {token}"}

    def _own_namespace(self) -> str:
        try:
            return (self._credentials / "namespace").read_text().strip() or "default"
        except OSError:
            return "default"


def _api_of_cluster() -> str:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    if not host:
        raise ConfigError(
            "--discovery.source kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not set); "
            "name the API server with --discovery.kubernetes-api"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: a slice of a thousand endpoints is longer than what aiohttp reads as a line."""
    rest = b""
    async for data in stream.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
