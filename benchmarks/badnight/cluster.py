"""What runs in a bad night: two stores, each with an SSD and behind a link, two vLLM engines, routers."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import psutil
from routersoak.cluster import RouterProcess

from badnight.members import Engine, Programs, Store, tail
from tests.engine.rig import BLOCK_TOKENS

_READY_TIMEOUT_S = 300.0


class Cluster:
    """`shares`: both engines use the first store, and there is a router for prefill and decode besides the
    one for mixed engines. Otherwise each has a store of its own, and prefixes are copied between them.
    `has_shm`: the second engine uses shared memory, not its store's link."""

    def __init__(
        self,
        folder: Path,
        programs: Programs,
        seed: int,
        *,
        shares: bool,
        has_shm: bool,
        remote_url: str = "",
    ) -> None:
        self.shares = shares
        self.folder = folder
        self._has_shm = has_shm
        self.stores = [Store("s0", folder, seed, remote_url), Store("s1", folder, seed)]
        self._programs = programs
        self.engines: list[Engine] = []
        self.routers: dict[str, RouterProcess] = {}
        self._num_routers = 0

    async def start(self) -> None:
        """AssertionError or SystemFailed when something does not even start."""
        for store in self.stores:
            await store.link.start()
        near, far = self.stores[0], self.stores[0 if self.shares else 1]
        for name, store in (("e0", near), ("e1", far)):
            by_link = {"store_address": store.link.address, "planes": ["tcp"]}
            extra = by_link if name == "e0" or not self._has_shm else {}
            self.engines.append(Engine(name, store, self._programs, self.folder, extra))
            self.engines[-1].start()
        await asyncio.gather(*(self.wait_healthy(engine) for engine in self.engines))
        for name in ("mixed", "split") if self.shares else ("mixed",):
            await self.start_router(name)

    async def wait_healthy(self, engine: Engine) -> None:
        deadline = asyncio.get_running_loop().time() + _READY_TIMEOUT_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
                    async with session.get(f"{engine.url}/health") as answer:
                        if answer.status == 200:
                            return
                assert not engine.has_died, tail(engine.log)
                assert asyncio.get_running_loop().time() < deadline, tail(engine.log)
                await asyncio.sleep(0.2)

    async def start_router(self, name: str) -> None:
        self._num_routers += 1
        log_name = f"{name}-{self._num_routers}"  # of each process its own
        self.routers[name] = await asyncio.to_thread(
            RouterProcess, log_name, self._router_flags(name), self.folder
        )

    def _router_flags(self, name: str) -> list[str]:
        first, second = (engine.url for engine in self.engines)
        if name == "split":
            flags = ["--prefill", first, "--decode", second]
            flags += ["--pd-protocol", "suite", "--pd-wait-ms", "10000"]
        else:
            flags = ["--worker-urls", first, second, "--policy", "global_cache_aware"]
            flags += ["--block-size", str(BLOCK_TOKENS)]
            for engine in self.engines:
                flags += ["--kv-events", f"{engine.url}={','.join(engine.events)}"]
                flags += ["--engine-stores", f"{engine.url}={engine.store.link.address}"]
            for store in self.stores:
                flags += ["--store-kv-events", f"{','.join(store.events)}={store.link.address}"]
        often = ["--health.interval-ms", "500", "--health.startup-interval-ms", "200"]
        return [*flags, *often, "--cb-timeout-duration-secs", "2"]

    def url_of(self, router: str) -> str:
        return f"http://127.0.0.1:{self.routers[router].port}"

    def dead(self) -> list[str]:
        """Names of what has ended without having been told to."""
        members: Sequence[Engine | Store] = [*self.engines, *self.stores]
        return [member.name for member in members if member.has_died]

    def rss_bytes(self) -> dict[str, int]:
        """Of what runs."""
        sizes: dict[str, int] = {}
        pids = {name: [router.process.pid] for name, router in self.routers.items()}
        pids |= {store.name: [store.process.pid] for store in self.stores if store.is_wanted}
        pids |= {e.name: [process.pid for process in e.processes()] for e in self.engines if e.is_wanted}
        for name, of_name in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes[name] = sum(psutil.Process(pid).memory_info().rss for pid in of_name)
        return sizes

    async def close(self) -> None:
        for store in self.stores:
            await store.link.close()
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        for router in self.routers.values():
            router.process.stop()
        for engine in self.engines:
            engine.end()
            engine.kill()
        for store in self.stores:
            store.end()
