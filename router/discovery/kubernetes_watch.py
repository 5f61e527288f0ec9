"""One list of objects in Kubernetes, kept as it is: list, watch, and list again when a watch cannot go on.

The token of the service account is read anew for each request: Kubernetes replaces it while the pod runs.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from router.discovery.kubernetes_objects import ObjectList, WatchEvent

logger = logging.getLogger(__name__)
T = TypeVar("T")

# The API server ends a watch after this; it is then begun again. Longer silence is a dead connection.
_WATCH_S = 300
_SILENCE_S = 330.0
_LIST_TIMEOUT_S = 30.0

_EVENT = msgspec.json.Decoder(WatchEvent)


class _StartAgain(Exception):
    """The watch cannot go on from where it was: list anew."""


class ApiServer:
    """Where it is, and what it lets us in with."""

    def __init__(self, url: str, credentials: Path) -> None:
        self.url = url
        self._credentials = credentials

    def session(self) -> aiohttp.ClientSession:
        context: ssl.SSLContext | bool = True
        ca = self._credentials / "ca.crt"
        if self.url.startswith("https:") and ca.exists():
            context = ssl.create_default_context(cafile=str(ca))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=2))

    def head(self) -> dict[str, str]:
        try:
            token = (self._credentials / "token").read_text().strip()
        except OSError:
            return {}  # an API server that asks for none, such as kubectl proxy
        return {"authorization": f"Bearer {token}"}


class KubernetesWatch(Generic[T]):
    """The objects of type `kind` (a Struct with metadata) at `path` that `selector` chooses by their labels.
    `is_known` is True from the first attempt on, whether it found anything or not."""

    def __init__(self, api: ApiServer, path: str, selector: str, kind: Any) -> None:
        self.objects: dict[str, T] = {}
        self.is_known = False
        self._api = api
        self._url = f"{api.url}{path}"
        self._selector = selector
        self._version = ""
        self._list: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(ObjectList[kind])
        self._object: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

    async def run(self, changed: Callable[[], None], retry_s: float) -> None:
        """For ever. Calls `changed` after each change; what cannot be had now is asked for again after
        `retry_s`, and so is what ended sooner than that."""
        loop, is_reached = asyncio.get_running_loop(), True
        while True:
            try:
                async with self._api.session() as session:
                    await self._list_all(session)
                    is_reached = self.is_known = True
                    changed()
                    while True:
                        began_at = loop.time()
                        await self._watch(session, changed)
                        if loop.time() < began_at + retry_s:
                            await asyncio.sleep(retry_s)
            except _StartAgain as reason:
                logger.info("the list of engines is read anew: %s", reason)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, msgspec.DecodeError) as error:
                if is_reached:
                    why = str(error) or type(error).__name__
                    logger.warning("Kubernetes cannot be asked for engines; the last ones stay: %s", why)
                is_reached = False
            if not self.is_known:
                self.is_known = True
                changed()
            await asyncio.sleep(retry_s)

    async def _list_all(self, session: aiohttp.ClientSession) -> None:
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        params = {"labelSelector": self._selector}
        async with session.get(self._url, params=params, headers=self._api.head(), timeout=timeout) as answer:
            answer.raise_for_status()
            listed = self._list.decode(await answer.read())
        self.objects = {one.metadata.name: one for one in listed.items}  # type: ignore[attr-defined]
        self._version = listed.metadata.resourceVersion

    async def _watch(self, session: aiohttp.ClientSession, changed: Callable[[], None]) -> None:
        """Returns when the watch ended as it should."""
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
            "resourceVersion": self._version,
        }
        silence = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        async with session.get(self._url, params=params, headers=self._api.head(), timeout=silence) as answer:
            if answer.status == 410:
                raise _StartAgain("the version to watch from is gone")
            answer.raise_for_status()
            async for line in _lines(answer.content):
                if self._apply(_EVENT.decode(line)):
                    changed()

    def _apply(self, event: WatchEvent) -> bool:
        """Whether the engines may have changed."""
        if event.type == "ERROR":  # a Status; mostly 410: too old a version
            raise _StartAgain(bytes(event.object).decode(errors="replace"))
        one = self._object.decode(event.object)
        self._version = one.metadata.resourceVersion
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self.objects.pop(one.metadata.name, None)
        else:
            self.objects[one.metadata.name] = one
        return True


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: a slice of a thousand endpoints is longer than what aiohttp reads as a line."""
    rest = b""
    async for data in stream.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
