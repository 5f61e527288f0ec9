"""An API server that ends every watch at once, or never knows the version to go on from, is not besieged."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.discovery import kubernetes_watch
from router.discovery.endpoint_slices import EndpointSlice
from router.discovery.kubernetes_watch import ApiServer, KubernetesWatch

LISTED = b'{"metadata": {"resourceVersion": "7"}, "items": []}'
MOST = 20
RETRY_S = 5.0


class Answer:
    def __init__(self, status: int) -> None:
        self.status = status
        self.content = self

    def raise_for_status(self) -> None: ...

    async def read(self) -> bytes:
        return LISTED

    async def iter_any(self) -> AsyncIterator[bytes]:
        for nothing in ():
            yield nothing


class Session:
    def __init__(self, watch_status: int) -> None:
        self.asked: list[str] = []
        self._watch_status = watch_status

    @asynccontextmanager
    async def get(self, url: str, params: dict[str, str], **_: Any) -> AsyncIterator[Answer]:
        kind = "watch" if "watch" in params else "list"
        self.asked.append(kind)
        if len(self.asked) >= MOST:
            raise asyncio.CancelledError
        yield Answer(self._watch_status if kind == "watch" else 200)


@pytest.mark.parametrize(
    ("status", "asked"),
    [(200, ["list", "watch", "watch", "watch"]), (410, ["list", "watch"] * 3)],
    ids=["ends at once", "too old"],
)
def test_between_two_questions_there_is_a_pause(
    status: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, paused_s = Session(status), []

    @asynccontextmanager
    async def opened(_: ApiServer) -> AsyncIterator[Session]:
        yield session

    async def sleep(seconds: float) -> None:
        paused_s.append(seconds)
        if len(paused_s) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(ApiServer, "session", opened)
    monkeypatch.setattr(kubernetes_watch.asyncio, "sleep", sleep)
    watch: KubernetesWatch[EndpointSlice] = KubernetesWatch(
        ApiServer("http://api", Path("/nowhere")), "/slices", "a=b", EndpointSlice
    )
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run(lambda: None, RETRY_S))
    assert session.asked == asked and paused_s == [RETRY_S] * 3
