"""What goes wrong in a bad night, one fault a function; it has healed when its function returns."""

import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import aiohttp
import msgspec

from badnight.cluster import Cluster
from badnight.members import Engine, Store

_DRAIN_TIMEOUT_S = 60.0


class Trouble(msgspec.Struct):
    """`excuses`: a request that met it may fail, never be answered wrongly. `ended_s` is 0 while it lasts."""

    fault: str
    target: str
    began_s: float
    excuses: bool
    ended_s: float = 0.0

    def __str__(self) -> str:
        ended = f"{self.ended_s:.1f}" if self.ended_s else "the end"
        return f"{self.fault} of {self.target}, {self.began_s:.1f} to {ended}"


class Remote(Protocol):
    """The server of the remote level, such as tests.remotes.ValkeyServer."""

    def start(self) -> None: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def go_on(self) -> None: ...


class Target(NamedTuple):
    """`name`: of what can have one fault at a time."""

    cluster: Cluster
    rng: random.Random
    name: str
    store: Store
    engine: Engine
    remote: Remote | None = None

    def duration_s(self, longest_s: float) -> float:
        return self.rng.uniform(0.3, longest_s)


class Fault(NamedTuple):
    """`resource`: what kind of target it takes."""

    run: Callable[[Target], Awaitable[None]]
    resource: str
    excuses: bool = False


async def kill_store(target: Target) -> None:
    await asyncio.to_thread(target.store.kill)
    await asyncio.sleep(target.duration_s(4))
    await asyncio.to_thread(target.store.start)


async def restart_store(target: Target) -> None:
    """Gracefully: what is in its DRAM goes to its SSD first."""
    await asyncio.to_thread(target.store.end)
    await asyncio.sleep(target.duration_s(2))
    await asyncio.to_thread(target.store.start)


async def stop_store(target: Target) -> None:
    """It answers nothing for a while, and its connections stay."""
    os.kill(target.store.process.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(target.duration_s(6))
    finally:
        os.kill(target.store.process.pid, signal.SIGCONT)


async def drain_store(target: Target) -> None:
    command = [sys.executable, "-m", "store_server.cli", "drain", "--address", target.store.process.address]
    await asyncio.to_thread(
        subprocess.run, command, check=True, capture_output=True, timeout=_DRAIN_TIMEOUT_S
    )
    await asyncio.sleep(target.duration_s(3))
    await restart_store(target)


async def cut_link(target: Target) -> None:
    """Again and again."""
    for _ in range(target.rng.randint(1, 5)):
        target.store.link.cut()
        await asyncio.sleep(target.duration_s(1))


async def truncate_link(target: Target) -> None:
    for _ in range(target.rng.randint(1, 5)):
        target.store.link.truncates = True
        await asyncio.sleep(target.duration_s(1))
    target.store.link.truncates = False


async def delay_link(target: Target) -> None:
    target.store.link.delay_s = target.rng.choice((0.005, 0.05, 0.5))
    try:
        await asyncio.sleep(target.duration_s(6))
    finally:
        target.store.link.delay_s = 0.0


async def stall_link(target: Target) -> None:
    target.store.link.stall()
    try:
        await asyncio.sleep(target.duration_s(8))
    finally:
        target.store.link.flow()


async def flip_link(target: Target) -> None:
    target.store.link.flip_every_bytes = target.rng.choice((20_000, 200_000, 2_000_000))
    try:
        await asyncio.sleep(target.duration_s(8))
    finally:
        target.store.link.flip_every_bytes = 0


async def fill_disk(target: Target) -> None:
    """No file may grow; the store's own way back is to find room again."""
    if not target.store.is_wanted:  # one that is just starting could not have its pool
        return
    pid = target.store.process.pid
    with contextlib.suppress(ProcessLookupError):  # killed just then, or meanwhile
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (64 << 10, hard))
        await asyncio.sleep(target.duration_s(8))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


async def rot_disk(target: Target) -> None:
    """Bits change in what lies on the disk. The index files, too."""
    for path in target.store.ssd.rglob("segment-*"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            size = path.stat().st_size
            for _ in range(3 if size else 0):
                position = target.rng.randrange(size)
                (byte,) = os.pread(file.fileno(), 1, position) or b"\0"
                os.pwrite(file.fileno(), bytes([byte ^ 1 << target.rng.randrange(8)]), position)
    await asyncio.sleep(0)


async def kill_remote(target: Target) -> None:
    assert target.remote is not None
    await asyncio.to_thread(target.remote.kill)
    await asyncio.sleep(target.duration_s(6))
    await asyncio.to_thread(target.remote.start)


async def pause_remote(target: Target) -> None:
    assert target.remote is not None
    target.remote.pause()
    try:
        await asyncio.sleep(target.duration_s(6))
    finally:
        target.remote.go_on()


async def kill_engine(target: Target) -> None:
    """While it computes for somebody, if it does so within seconds. It is up again when this returns."""
    for _ in range(100):
        if await _num_running(target.engine):
            break
        await asyncio.sleep(0.05)
    await asyncio.to_thread(target.engine.kill)
    await asyncio.sleep(target.duration_s(3))
    target.engine.start()
    await target.cluster.wait_healthy(target.engine)


async def stop_engine(target: Target) -> None:
    target.engine.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(target.duration_s(5))
    finally:
        target.engine.signal(signal.SIGCONT)


async def reset_engine(target: Target) -> None:
    """It forgets its prefixes, if nobody uses them just then: what is asked next comes from the store."""
    async with aiohttp.ClientSession() as session, session.post(f"{target.engine.url}/reset_prefix_cache"):
        pass


async def kill_router(target: Target) -> None:
    name = target.rng.choice(sorted(target.cluster.routers))
    target.cluster.routers[name].process.stop(signal.SIGKILL)
    await target.cluster.start_router(name)


async def _num_running(engine: Engine) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("vllm:num_requests_running{"):
                return float(line.rpartition(" ")[2])
    return 0.0


FAULTS = {
    "kill": Fault(kill_store, "store"),
    "restart": Fault(restart_store, "store"),
    "stop": Fault(stop_store, "store"),
    "drain": Fault(drain_store, "store"),
    "cut": Fault(cut_link, "link"),
    "truncate": Fault(truncate_link, "link"),
    "delay": Fault(delay_link, "link"),
    "stall": Fault(stall_link, "link"),
    "flip": Fault(flip_link, "link"),
    "fill": Fault(fill_disk, "disk"),
    "rot": Fault(rot_disk, "disk"),
    "kill remote": Fault(kill_remote, "remote"),
    "pause remote": Fault(pause_remote, "remote"),
    "kill engine": Fault(kill_engine, "engine", excuses=True),
    "stop engine": Fault(stop_engine, "engine", excuses=True),
    "reset engine": Fault(reset_engine, "engine"),
    "kill router": Fault(kill_router, "router", excuses=True),
}
