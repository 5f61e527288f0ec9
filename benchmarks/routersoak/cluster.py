"""The engines of a soak and the trouble they get into; the routers, and what is seen of them from outside."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType

import msgspec
from routerbench.ours import router_command
from storebench.processes import Process, SystemFailed, cpu_seconds, free_port

_ENGINE = Path(__file__).resolve().parents[1] / "router_engine.py"
_READY_TIMEOUT_S = 60.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Engine:
    """A stand-in engine on a port of its own, which survives its processes."""

    def __init__(self, log_path: Path) -> None:
        self.port = free_port()
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with open(self._log_path, "ab") as log:
            command = [sys.executable, str(_ENGINE), "--port", str(self.port), "--step-ms", "20"]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Chaos:
    """Kills an engine now and then, or stops it for a while; never more than one at a time, so that there is
    always somebody who could answer."""

    def __init__(self, engines: list[Engine], *, every_s: float) -> None:
        self._engines = engines
        self._every_s = every_s
        self.done: Counter[str] = Counter()

    async def run(self, seed: int) -> None:
        """Until it is cancelled; leaves every engine running."""
        rng = random.Random(f"{seed}/chaos")
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.5) * self._every_s)
            engine = rng.choice(self._engines)
            if rng.random() < 0.75:
                await self._kill(engine, rng.uniform(0.1, 0.5) * self._every_s)
            else:
                await self._stop(engine, rng.uniform(0.1, 0.4) * self._every_s)

    async def _kill(self, engine: Engine, down_s: float) -> None:
        engine.kill()
        self.done["killed and restarted"] += 1
        try:
            await asyncio.sleep(down_s)
        finally:
            engine.start()

    async def _stop(self, engine: Engine, stopped_s: float) -> None:
        engine.signal(signal.SIGSTOP)
        self.done["stopped for a while"] += 1
        try:
            await asyncio.sleep(stopped_s)
        finally:
            engine.signal(signal.SIGCONT)


class Gauges(msgspec.Struct, frozen=True):
    """Of a router: what it says itself, and what the kernel says of its process."""

    active_requests: int
    in_flight: int
    client_connections: int
    rss_bytes: int
    open_files: int
    cpu_s: float


class RouterProcess:
    """A `mooncake-router`. SystemFailed when it does not begin to listen."""

    def __init__(self, name: str, flags: list[str], folder: Path, *, compiled: bool = False) -> None:
        ready = folder / f"{name}.ready"
        log_path = folder / f"{name}.log"
        command = [*router_command(compiled=compiled), "--port", "0", "--ready-file", str(ready), *flags]
        # An engine that is down for seconds would fill the log with each of its requests.
        self.process = Process([*command, "--log-level", "error"], log_path)
        try:
            self.process.wait_until(ready.exists, _READY_TIMEOUT_S, f"the {name} router")
        except SystemFailed:
            self.process.stop()
            raise
        self.name = name
        self.port: int = json.loads(ready.read_text())["port"]

    async def gauges(self) -> Gauges:
        text = (await self.get("/metrics")).decode()
        totals: Counter[str] = Counter()
        for line in text.splitlines():
            if line.startswith("mooncake_router_"):
                name, _, value = line.rpartition(" ")
                totals[name.partition("{")[0].removeprefix("mooncake_router_")] += int(float(value))
        return Gauges(
            totals["active_requests"],
            totals["instance_in_flight"],
            totals["client_connections"],
            *_of_process(self.process.pid),
        )

    async def get(self, path: str) -> bytes:
        """The body of its answer. A connection each, as a scraper may do it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"GET %b HTTP/1.1\r\nhost: soak\r\n\r\n" % path.encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        if not head.startswith(b"http/1.1 200"):
            raise SystemFailed(f"the {self.name} router answers GET {path} with {head[:40]!r}")
        return body


def _of_process(pid: int) -> tuple[int, int, float]:
    """Resident bytes, open files, CPU seconds so far."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * _PAGE_BYTES, len(list(Path(f"/proc/{pid}/fd").iterdir())), cpu_seconds(pid)


class Stack:
    """Engines and routers that end with it, whatever happens."""

    def __init__(self, folder: Path, *, compiled: bool = False) -> None:
        self.engines = {
            name: Engine(folder / f"{name}.log") for name in ("m0", "m1", "m2", "p0", "p1", "d0", "d1")
        }
        self.routers: list[RouterProcess] = []
        urls = {name: engine.url for name, engine in self.engines.items()}
        often = [
            "--health.interval-ms",
            "1000",
            "--health.startup-interval-ms",
            "200",
            "--cb-timeout-duration-secs",
            "2",
        ]
        flavours = {
            "mixed": [
                *("--worker-urls", urls["m0"], urls["m1"], urls["m2"], "--policy", "global_cache_aware"),
                *("--admission", "early", "--ttft-slo-ms", "20000", "--tpot-slo-ms", "20000"),
            ],
            "split": [
                *(
                    "--prefill",
                    urls["p0"],
                    "--prefill",
                    urls["p1"],
                    "--decode",
                    urls["d0"],
                    "--decode",
                    urls["d1"],
                ),
                *("--policy", "global_cache_aware", "--decode-policy", "least_tbt"),
            ],
        }
        try:
            for name, flags in flavours.items():
                self.routers.append(RouterProcess(name, [*flags, *often], folder, compiled=compiled))
        except SystemFailed:
            self.close()
            raise

    def __enter__(self) -> "Stack":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for router in self.routers:
            router.process.stop()
        for engine in self.engines.values():
            engine.signal(signal.SIGCONT)
            engine.kill()
