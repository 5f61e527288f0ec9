"""A remote in the hands of a test, and the tier over it driven inside one loop."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from kvcore.wire.messages import Status
from store_server.core.tiering import Acceptance
from store_server.remote import RemoteConfig, RemoteTier
from store_server.ssd import Dropped, Loaded, ReadRequest, WriteRequest, Written

DEADLINE_S = 60.0


class ScriptedBackend:
    """A RemoteBackend of a dict that a test can slow down, break and look into."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.failure: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.num_requests = 0
        self.num_at_once = self.most_at_once = 0

    async def put(self, name: str, value: bytes) -> None:
        await self._pass()
        self.values[name] = value

    async def get(self, name: str) -> memoryview | None:
        await self._pass()
        value = self.values.get(name)
        return None if value is None else memoryview(value)

    async def delete(self, names: Sequence[str]) -> None:
        await self._pass()
        for name in names:
            self.values.pop(name, None)

    async def list(self) -> AsyncIterator[list[str]]:
        await self._pass()
        names = list(self.values)
        for first in range(0, len(names), 3):
            yield names[first : first + 3]
            await asyncio.sleep(0)

    async def close(self) -> None:
        pass

    async def _pass(self) -> None:
        self.num_requests += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.failure is not None:
                raise self.failure
        finally:
            self.num_at_once -= 1


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def value_of(number: int, size_bytes: int = 3000) -> bytes:
    return bytes([number % 251]) * size_bytes


class TierDriver:
    """What the store's loop does. `outcomes` collects everything that the tier said."""

    def __init__(
        self,
        backend: ScriptedBackend,
        max_in_flight_bytes: int = 1 << 20,
        max_keys: int = 10_000,
        notes_in: Sequence[Path] = (),
        **settings: Any,
    ) -> None:
        self.backend = backend
        self.outcomes: list[Any] = []
        self.num_listed = 0
        self._changed = asyncio.Event()
        config = RemoteConfig(url="file:///nowhere", **{"refresh_ms": 20, "timeout_ms": 5_000, **settings})
        self.tier = RemoteTier(config, backend, self._changed.set, self._listed)
        self.tier.read_notes(notes_in)
        self._bounds = (max_in_flight_bytes, max_keys)

    async def __aenter__(self) -> "TierDriver":
        self.tier.open(*self._bounds)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.backend.gate is not None:
            self.backend.gate.set()
        await self.tier.close(DEADLINE_S)

    def _listed(self) -> None:
        self.num_listed += 1

    def poll(self) -> None:
        self._changed.clear()
        self.outcomes += self.tier.poll()

    async def until(self, condition: Callable[[], Any]) -> Any:
        async def wait() -> Any:
            while True:
                self.poll()
                if value := condition():
                    return value
                await asyncio.sleep(0.002)

        return await asyncio.wait_for(wait(), DEADLINE_S)

    async def listed_again(self) -> None:
        """Until a listing has begun and ended after this call."""
        seen = self.num_listed
        await self.until(lambda: self.num_listed >= seen + 2)

    def begin_write(self, number: int, value: bytes | None = None, num_layers: int = 1) -> Acceptance:
        value = value_of(number) if value is None else value
        view = memoryview(bytearray(value))
        return self.tier.write(WriteRequest(key_of(number), [view], len(value), num_layers, (), number))

    def written(self, number: int) -> Status | None:
        found = [o.status for o in self.outcomes if isinstance(o, Written) and o.request.token == number]
        return found[-1] if found else None

    async def write(self, number: int, value: bytes | None = None, num_layers: int = 1) -> Status:
        self.outcomes.clear()
        assert self.begin_write(number, value, num_layers) is Acceptance.QUEUED
        status = await self.until(lambda: (self.written(number),) if self.written(number) is not None else ())
        return Status(status[0])

    async def read(self, number: int) -> bytes | Status:
        """Its bytes, or why there are none."""
        place = self.tier.find(key_of(number))
        if place is None:
            return Status.MISSING
        buffer = bytearray(os.urandom(place.size_bytes))
        half = place.size_bytes // 2
        views = [memoryview(buffer)[:half], memoryview(buffer)[half:]]
        self.outcomes.clear()
        assert self.tier.read(ReadRequest(key_of(number), views, number))
        (outcome,) = await self.until(lambda: [o for o in self.outcomes if isinstance(o, Loaded)])
        return bytes(buffer) if outcome.status is Status.OK else Status(outcome.status)

    def dropped(self) -> list[tuple[list[bytes], str]]:
        return [(list(o.keys), o.reason) for o in self.outcomes if isinstance(o, Dropped)]
