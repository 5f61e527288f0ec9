"""The morning after a bad night: nothing is left of it, everything works, and prefixes are shared again."""

import asyncio
import contextlib
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import aiohttp
from routersoak.client import Ending

from badnight.client import Asker
from badnight.cluster import Cluster
from badnight.members import SOCKET, Engine, Store, counters, store_stats
from badnight.questions import Question
from kvcore import metrics

_SETTLE_S = 90.0
_LOOK_EVERY_S = 2.0
_VERIFY_TIMEOUT_S = 120.0
_EMPTY_STORE = (
    metrics.LEASES,
    metrics.WAITERS,
    metrics.WAITING_FOR_ROOM,
    metrics.QUARANTINED_BYTES,
    metrics.PROMOTIONS,
    metrics.OBJECTS_PENDING,
    metrics.COPYING,
)
_IDLE_ENGINE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_FETCHED = "vllm:external_prefix_cache_hits_total"
_HOOK_ERRORS = f"{metrics.CONNECTOR_PREFIX}{metrics.HOOK_ERRORS_TOTAL}"


class Totals:
    """Counters of engines and stores, summed over their processes: a counter that went back began anew."""

    def __init__(self, cluster: Cluster) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self._cluster = cluster
        self._last: dict[tuple[str, str], float] = {}

    async def look(self, session: aiohttp.ClientSession) -> None:
        """At all that answer."""
        for engine in self._cluster.engines:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                for name, value in (await counters(session, engine)).items():
                    is_ours = name.startswith(metrics.CONNECTOR_PREFIX) and name.endswith("_total")
                    if is_ours or name == _FETCHED:
                        self._add(engine.name, name, value)
        for store in self._cluster.stores:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                for name, value in (await store_stats(session, store)).items():
                    if name.endswith("_total"):
                        self._add(store.name, name, value)

    async def keep_looking(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self.look(session)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _add(self, who: str, name: str, value: float) -> None:
        last = self._last.get((who, name), 0.0)
        self.sums[name] += value - last if value >= last else value
        self._last[who, name] = value


async def see_morning(
    cluster: Cluster, session: aiohttp.ClientSession, asker: Asker, num_prompts: int, totals: Totals
) -> list[str]:
    """Complaints. Everything has ended then."""
    complaints = await _what_is_left(cluster, session)
    for engine in cluster.engines:
        complaints += await _answers_and_shares(engine, session, asker, num_prompts)
    complaints += await _what_is_left(cluster, session)
    for store in cluster.stores:
        complaints += await asyncio.to_thread(_verify, store)
    await totals.look(session)
    if hook_errors := totals.sums[_HOOK_ERRORS]:
        complaints.append(f"{hook_errors:.0f} errors of the connector were kept out of an engine's step")
    return [*complaints, *await asyncio.to_thread(_end, cluster)]


async def _what_is_left(cluster: Cluster, session: aiohttp.ClientSession) -> list[str]:
    """Waits for all gauges to return to 0; what has not in the end."""
    deadline = asyncio.get_running_loop().time() + _SETTLE_S
    left: list[str] = []
    while True:
        left = [
            f"{who} has {name} {value:g} left"
            for who, gauges in (await _gauges(cluster, session)).items()
            for name, value in gauges.items()
            if value
        ]
        if not left or asyncio.get_running_loop().time() > deadline:
            return left
        await asyncio.sleep(0.5)


async def _gauges(cluster: Cluster, session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
    """All that is 0 when nobody asks anything."""
    found: dict[str, dict[str, float]] = {}
    for name, router in cluster.routers.items():
        gauges = await router.gauges()
        found[f"the {name} router"] = {"requests": gauges.active_requests, "legs": gauges.in_flight}
    for engine in cluster.engines:
        values = await counters(session, engine)
        found[engine.name] = {name: values[name] for name in _IDLE_ENGINE}
    for store in cluster.stores:
        stats = await store_stats(session, store)
        found[store.name] = {name: stats[name] for name in _EMPTY_STORE}
    return found


async def _answers_and_shares(
    engine: Engine, session: aiohttp.ClientSession, asker: Asker, num_prompts: int
) -> list[str]:
    """Every prompt, asked of the engine itself; and again until something came from the store."""
    complaints = []
    deadline = asyncio.get_running_loop().time() + _SETTLE_S
    before = (await counters(session, engine))[_FETCHED]
    while True:
        async with session.post(f"{engine.url}/reset_prefix_cache"):
            pass
        for number in range(num_prompts):
            asked = await asker.ask(engine.name, engine.url, Question(number, streams=False))
            if asked.is_wrong or asked.ending is not Ending.ANSWERED:
                became = f"{asked.ending.value} {asked.detail} {asked.tokens}"
                complaints.append(f"{engine.name}, in the morning, prompt {number}: {became}")
        if (await counters(session, engine))[_FETCHED] > before or complaints:
            return complaints
        if asyncio.get_running_loop().time() > deadline:
            return [f"{engine.name} finds nothing in its store any more"]


def _verify(store: Store) -> list[str]:
    """The first time drops what was spoiled; the second must find nothing."""
    command = [sys.executable, "-m", "store_server.cli", "verify", "--address", store.process.address]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERIFY_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return []
    return [f"{store.name} is not sound: {done.stdout} {done.stderr}"]


def _end(cluster: Cluster) -> list[str]:
    """Asks everybody to end, engines first; what that leaves."""
    complaints = []
    for router in cluster.routers.values():
        router.process.stop()
    for engine in cluster.engines:
        engine.end()
        engine.kill()
    for store in cluster.stores:
        store.end()
        complaints += store.complaints
        if (store.folder / SOCKET).exists():
            complaints.append(f"the socket of {store.name} is left")
    for log in sorted(cluster.folder.rglob("*.log")):
        is_engines = log.stem in [engine.name for engine in cluster.engines]
        if not is_engines and "Traceback" in log.read_text(errors="replace"):
            complaints.append(f"a traceback in {log.relative_to(cluster.folder)}: {_traceback(log)}")
    return complaints


def _traceback(log: Path) -> str:
    text = log.read_text(errors="replace")
    return text[text.index("Traceback") :][:1500]
