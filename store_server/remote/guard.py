"""Every request to the remote passes here: its deadline, and the breaker that sees how it ends."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from store_server.remote.backend import RemoteFailure
from store_server.remote.breaker import Breaker

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Guard:
    """`opened` is set while the remote counts as down."""

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what = what
        self.timeout_s = timeout_s
        self._breaker = Breaker()
        self.opened = asyncio.Event()
        self.num_failures = 0
        self.last_failure = ""
        self._abandoned: set[asyncio.Future[Any]] = set()

    @property
    def is_open(self) -> bool:
        return self._breaker.is_open

    @property
    def pause_s(self) -> float:
        return self._breaker.pause_s

    async def call(self, request: Awaitable[T]) -> T:
        """Its answer. RemoteFailure for whatever goes wrong: nothing that a library raises gets further."""
        task = asyncio.ensure_future(request)
        try:
            await asyncio.wait({task}, timeout=self.timeout_s)
        finally:
            if not task.done():
                self._abandon(task)
        if not task.done():
            raise self._failed(f"no answer within {self.timeout_s:g} s")
        try:
            answer = task.result()
        except RemoteFailure as error:
            self._failed(str(error))
            raise
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error
        if self._breaker.succeeded():
            self.opened.clear()
            logger.warning("the remote is back", extra={"remote": self._what})
        return answer

    def _abandon(self, task: "asyncio.Future[T]") -> None:
        """Not waited for, as wait_for would: a library may take its time to tidy up."""
        self._abandoned.add(task)
        task.add_done_callback(self._tidied_up)
        task.cancel()

    def _tidied_up(self, task: "asyncio.Future[Any]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # nobody else will ask for it

    def _failed(self, reason: str) -> RemoteFailure:
        self.num_failures += 1
        self.last_failure = reason
        if self._breaker.failed():
            self.opened.set()
            logger.error(
                "the remote is down: its objects are misses until it is back",
                extra={"remote": self._what, "reason": reason},
            )
        else:
            logger.debug("a request to the remote failed: %s", reason)
        return RemoteFailure(reason)
