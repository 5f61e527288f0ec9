"""The engines and stores of a bad night: how they are started, killed, asked for their numbers."""

import contextlib
import json
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from badnight.link import Link
from tests.engine.rig import StoreProcess, end_process, free_port, transfer_config
from tests.engine.served import Server, vllm_server

SOCKET = "unix"  # of a store, in its folder
# Less than the documents take, so that everything moves all the time: 128 KiB a block of the tiny model.
_ENGINE_KV_BYTES = 24 << 20
_POOL, _SSD_CAPACITY = "16mb", "48mb"
_METRICS_TIMEOUT = aiohttp.ClientTimeout(total=10)
# What a bad store may cost a request and an engine; the defaults, but for a slow machine and a small store.
_LIMITS = {
    "lookup_timeout_ms": "500ms",
    "lookup_wait_ms": "50ms",
    "load_timeout_ms": "10s",
    "pd_wait_ms": "10s",
    "staging_size_bytes": "32mb",
}


class Programs(msgspec.Struct, frozen=True):
    """`engine_scripts`: the folder of `vllm`, which may be of another environment than the rest."""

    model: str
    engine_scripts: Path = Path(sys.executable).parent


class Engine:
    """A vLLM on a port of its own, which survives its processes. `is_wanted`: nobody has killed it."""

    def __init__(
        self, name: str, store: "Store", programs: Programs, folder: Path, extra: dict[str, Any]
    ) -> None:
        self.name = name
        self.store = store
        self.port = free_port()
        self.is_wanted = False
        self.events = f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"
        self._programs = programs
        self._folder = folder
        self._extra = extra
        self._sockets = folder / f"{name}.rpc"
        self._server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    def start(self) -> None:
        transfer = transfer_config(self.store.process, **{**_LIMITS, **self._extra})
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.events[0],
            "replay_endpoint": self.events[1],
        }
        flags = ["--kv-cache-memory-bytes", str(_ENGINE_KV_BYTES), "--kv-events-config", json.dumps(events)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_RPC_BASE_PATH": str(self._sockets)}
        shutil.rmtree(self._sockets, ignore_errors=True)  # those of a process that was killed
        self._sockets.mkdir()
        self._server = vllm_server(
            self._programs.model,
            transfer,
            self.log,
            environment,
            self.port,
            [*flags, "--prefix-caching-hash-algo", "sha256_cbor"],
            self._programs.engine_scripts,
        )
        self.is_wanted = True

    def processes(self) -> list[psutil.Process]:
        """The server and its children, those that are there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._server is not None:
                process = psutil.Process(self._server.process.pid)
                return [process, *process.children(recursive=True)]
        return []

    def signal(self, number: int) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        self.is_wanted = False
        members = self.processes()
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(members, 30)
        if self._server is not None:
            self._server.process.wait()

    def end(self) -> None:
        """Asked to."""
        if self._server is not None:
            end_process(self._server.process)

    @property
    def has_died(self) -> bool:
        return self.is_wanted and self._server is not None and self._server.process.poll() is not None


class Store:
    """A mooncake-store; `link` stands before it, for whoever does not use shared memory."""

    def __init__(self, name: str, folder: Path, seed: int, remote_url: str = "") -> None:
        self.name = name
        self.folder = folder / name
        self.ssd = self.folder / "ssd"
        self.folder.mkdir()
        self.events = f"ipc://{self.folder}/ev", f"ipc://{self.folder}/replay"
        levels: list[dict[str, Any]] = [{"level": "ssd", "paths": [str(self.ssd)], "capacity": _SSD_CAPACITY}]
        if remote_url:
            levels.append({"level": "remote", "url": remote_url, "refresh": "5s"})
        self.process = StoreProcess(
            self.folder,
            *("--storage-levels", json.dumps(levels), "--unix-path", str(self.folder / SOCKET)),
            *("--events.endpoint", self.events[0], "--events.replay-endpoint", self.events[1]),
            *("--reservation-timeout-ms", "10s", "--save-timeout-ms", "5s"),
            pool_size=_POOL,
        )
        self.is_wanted = True
        self.complaints: list[str] = []
        self.link = Link(self.process.port, f"{seed}/{name}")

    @property
    def has_died(self) -> bool:
        process = self.process.process
        return self.is_wanted and process is not None and process.poll() is not None

    @property
    def log(self) -> Path:
        return self.folder / "store.log"

    def kill(self) -> None:
        self.is_wanted = False
        self.process.kill()

    def end(self) -> None:
        """Asked to; what is wrong with how it does is added to `complaints`."""
        self.is_wanted = False
        self.process.close()
        process = self.process.process
        if process is not None and (status := process.returncode):
            self.complaints.append(f"{self.name} was asked to end, and did with status {status}")

    def start(self) -> None:
        self.process.start()
        self.is_wanted = True


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


async def counters(session: aiohttp.ClientSession, engine: Engine) -> dict[str, float]:
    """Sums of the engine's metrics over their labels."""
    found: defaultdict[str, float] = defaultdict(float)
    async with session.get(f"{engine.url}/metrics", timeout=_METRICS_TIMEOUT) as answer:
        for line in (await answer.text()).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name.partition("{")[0]] += float(value)
    return found


async def store_stats(session: aiohttp.ClientSession, store: Store) -> dict[str, float]:
    url = f"http://127.0.0.1:{store.process.admin_port}/stats"
    async with session.get(url, timeout=_METRICS_TIMEOUT) as answer:
        values: dict[str, float] = await answer.json()
    return values
