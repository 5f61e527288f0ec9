"""A soak from beginning to end, and what it must show."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from routersoak.client import Clients, Ending
from routersoak.cluster import Chaos, Gauges, RouterProcess, Stack

_DASHBOARD_INTERVAL_S = 2.0
_SETTLE_TIMEOUT_S = 60.0
# Growth from the middle third to the last: what fragmentation and a filling history explain.
_FLAT_BYTES = 4 << 20
_FLAT_SHARE = 0.05


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    requests_per_s: float = 12.0  # of each router
    num_connections: int = 24  # to each router
    chaos_every_s: float = 10.0
    deadline_s: float = 60.0  # of one request: beyond it, it hangs
    sample_every_s: float = 5.0
    seed: int = 0
    compiled: bool = False  # the routers, their hot path


class Outcome(msgspec.Struct, kw_only=True):
    """Of one router. Sizes of thirds of the run are medians."""

    router: str
    seconds: float
    requests: int
    endings: dict[str, int]
    rss_bytes: list[int]  # of the first, middle and last third
    open_files: list[int]
    cpu_share: float  # of one core
    at_the_end: Gauges
    engine_troubles: dict[str, int]

    @property
    def num_hung(self) -> int:
        return self.endings.get(Ending.HUNG.value, 0)

    @property
    def is_flat(self) -> bool:
        _, middle, last = self.rss_bytes
        return last - middle <= max(_FLAT_BYTES, _FLAT_SHARE * middle)

    def complaints(self) -> list[str]:
        """What it should have shown and did not; memory in a run of ten minutes and more only."""
        found = []
        if self.num_hung:
            found.append(f"{self.num_hung} requests hung")
        left = self.at_the_end
        if left.active_requests or left.in_flight:
            found.append(
                f"{left.active_requests} requests and {left.in_flight} legs are left without clients"
            )
        if self.seconds >= 600 and not self.is_flat:
            found.append(f"memory grows: {', '.join(f'{size >> 20} MiB' for size in self.rss_bytes)}")
        if not self.endings.get(Ending.ANSWERED.value):
            found.append("nothing was answered")
        return found


async def soak(folder: Path, plan: Plan, progress: Callable[[str], None]) -> list[Outcome]:
    """One outcome for each router. SystemFailed when something does not even start."""
    with Stack(folder, compiled=plan.compiled) as stack:
        return await _soak(stack, plan, progress)


async def _soak(stack: Stack, plan: Plan, progress: Callable[[str], None]) -> list[Outcome]:
    clients = [
        Clients(
            router.port,
            num_connections=plan.num_connections,
            requests_per_s=plan.requests_per_s,
            deadline_s=plan.deadline_s,
        )
        for router in stack.routers
    ]
    chaos = Chaos(list(stack.engines.values()), every_s=plan.chaos_every_s)
    samples: list[list[Gauges]] = [[] for _ in stack.routers]
    traffic = [asyncio.create_task(c.run(plan.seed + number)) for number, c in enumerate(clients)]
    background = [
        asyncio.create_task(chaos.run(plan.seed)),
        *(asyncio.create_task(_look_at_dashboard(router)) for router in stack.routers),
    ]
    began = time.monotonic()
    try:
        while time.monotonic() < began + plan.seconds:
            await asyncio.sleep(plan.sample_every_s)
            for router, of_router in zip(stack.routers, samples, strict=True):
                of_router.append(await router.gauges())
            _raise_failures([*traffic, *background])
            progress(_progress_text(time.monotonic() - began, clients, samples))
        for client in clients:
            client.stop()
        await asyncio.gather(*traffic)
    finally:
        for task in [*background, *traffic]:
            task.cancel()
        await asyncio.gather(*background, *traffic, return_exceptions=True)
    seconds = time.monotonic() - began
    return [
        Outcome(
            router=router.name,
            seconds=seconds,
            requests=sum(client.endings.values()),
            endings=dict(client.endings.most_common()),
            rss_bytes=_thirds([gauges.rss_bytes for gauges in of_router]),
            open_files=_thirds([gauges.open_files for gauges in of_router]),
            cpu_share=(of_router[-1].cpu_s - of_router[0].cpu_s)
            / max((len(of_router) - 1) * plan.sample_every_s, plan.sample_every_s),
            at_the_end=await _settled(router),
            engine_troubles=dict(chaos.done),
        )
        for router, client, of_router in zip(stack.routers, clients, samples, strict=True)
    ]


async def _look_at_dashboard(router: RouterProcess) -> None:
    """As an open page does."""
    row = 0
    while True:
        data = msgspec.json.decode(await router.get(f"/dashboard/data?after={row}"))
        row = data["last_row"]
        await asyncio.sleep(_DASHBOARD_INTERVAL_S)


async def _settled(router: RouterProcess) -> Gauges:
    """The gauges once nothing is left, or when that has taken too long."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while True:
        gauges = await router.gauges()
        if not (gauges.active_requests or gauges.in_flight) or time.monotonic() > deadline:
            return gauges
        await asyncio.sleep(0.2)


def _raise_failures(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        if task.done():
            with contextlib.suppress(asyncio.CancelledError):
                task.result()


def _thirds(values: Sequence[int]) -> list[int]:
    size = max(len(values) // 3, 1)
    parts = (values[:size], values[size:-size] or values, values[-size:])
    return [int(statistics.median(part)) for part in parts]


def _progress_text(seconds: float, clients: Sequence[Clients], samples: Sequence[Sequence[Gauges]]) -> str:
    endings = sum((client.endings for client in clients), start=type(clients[0].endings)())
    sizes = ", ".join(f"{of_router[-1].rss_bytes / 2**20:.1f}" for of_router in samples)
    return f"{seconds:6.0f} s  {endings.total()} requests, {endings[Ending.HUNG.value]} hung, RSS {sizes} MiB"
