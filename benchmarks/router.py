"""What the router costs: CPU time a request and a streamed chunk, latency added, beside direct runs.

    python benchmarks/router.py [--seconds 4] [--cases a1,a32,b1,b128,c32k,pd32] [--json FILE]
                                [--vllm-router PATH]     # the peer's program, measured in the same run

Two stand-in engines (router_engine.py) and this load generator share the machine with the router. CPU time is
the kernel's own account of the router's process (/proc/PID/schedstat), so it is right on a busy machine too;
requests per second and latencies are not.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import msgspec
import uvloop

_HERE = Path(__file__).parent


class Case(msgspec.Struct, frozen=True):
    connections: int
    stream: bool = False
    prompt_bytes: int = 20
    separate_prefill: bool = False


CASES = {
    "a1": Case(1),
    "a32": Case(32),
    "b1": Case(1, stream=True),
    "b128": Case(128, stream=True),
    "c4k": Case(32, prompt_bytes=4096),
    "c32k": Case(32, prompt_bytes=32768),
    "pd32": Case(32, separate_prefill=True),
    "pdb128": Case(128, stream=True, separate_prefill=True),
}
CHUNKS = 64
# The second reads every prompt (as text), looks it up, predicts, and checks SLOs that nobody misses.
FLAVOURS = {
    "round_robin": [],
    "algorithm1": [
        *("--policy", "global_cache_aware", "--decode-policy", "least_tbt"),
        *("--admission", "early", "--ttft-slo-ms", "1000000000", "--tpot-slo-ms", "1000000000"),
    ],
}
PEER_POLICIES = ("round_robin", "cache_aware")


class Load:
    """A closed loop: every connection sends its next request when the answer to the last is complete."""

    def __init__(self, case: Case, port: int) -> None:
        body = msgspec.json.encode(
            {
                "model": "mock",
                "messages": [{"role": "user", "content": "x" * case.prompt_bytes}],
                "max_tokens": CHUNKS if case.stream else 8,
                "stream": case.stream,
            }
        )
        self.request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: bench\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (port, len(body), body)
        )
        self.port = port
        self.connections = case.connections
        self.running = True
        self.latencies: list[float] = []
        self.first_bytes: list[float] = []
        self.errors = 0

    async def run(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        made = [
            await loop.create_connection(lambda: Client(self), "127.0.0.1", self.port)
            for _ in range(self.connections)
        ]
        await asyncio.sleep(seconds)
        self.running = False
        for transport, _ in made:
            transport.abort()


class Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._left = -1
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._send()

    def _send(self) -> None:
        self._left = -1
        self._first = 0.0
        self._sent = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        load = self._load
        if not self._first and b"\r\n\r\n" in data:
            if not data.startswith(b"HTTP/1.1 200"):
                load.errors += 1
            if (at := data.find(b"content-length: ")) >= 0:
                length = int(data[at + 16 : data.index(b"\r\n", at)])
                self._left = length - (len(data) - data.index(b"\r\n\r\n") - 4)
            else:
                data = data[data.index(b"\r\n\r\n") + 4 :]
                if not data:
                    return
            self._first = time.perf_counter()
        elif self._left >= 0:
            self._left -= len(data)
        elif not self._first:
            self._first = time.perf_counter()
        if self._left == 0 or (self._left < 0 and data.endswith(b"0\r\n\r\n")):
            now = time.perf_counter()
            if load.running:
                load.latencies.append(now - self._sent)
                load.first_bytes.append(self._first - self._sent)
                self._send()


def cpu_seconds(pid: int) -> float:
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def start(command: list[str]) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def measure(case: Case, port: int, pid: int, seconds: float) -> dict[str, float]:
    uvloop.run(Load(case, port).run(0.5))
    load = Load(case, port)
    before = cpu_seconds(pid)
    uvloop.run(load.run(seconds))
    used = cpu_seconds(pid) - before
    requests = max(len(load.latencies), 1)
    figures = {
        "requests": requests,
        "errors": load.errors,
        "requests_per_s": requests / seconds,
        "cpu_us_per_request": used / requests * 1e6,
        "p50_us": statistics.median(load.latencies or [0]) * 1e6,
        "first_byte_p50_us": statistics.median(load.first_bytes or [0]) * 1e6,
    }
    if case.stream:
        figures["cpu_us_per_chunk"] = figures["cpu_us_per_request"] / CHUNKS
    return figures


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def measure_peer(case: Case, program: str, policy: str, urls: list[str], seconds: float) -> dict[str, float]:
    """vllm-project/router (Rust), by the flags both of us have; without P/D."""
    port = free_port()
    command = [program, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", policy, "--log-level", "error", "--worker-urls", *urls]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as peer:
        try:
            for _ in range(100):
                time.sleep(0.2)
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
            return measure(case, port, peer.pid, seconds)
        finally:
            peer.terminate()


def run_case(
    name: str, engines: list[tuple[int, int]], seconds: float, peer: str | None
) -> dict[str, dict[str, float]]:
    case = CASES[name]
    urls = [f"http://127.0.0.1:{port}" for _, port in engines]
    flags = ["--prefill", urls[0], "--decode", urls[1]] if case.separate_prefill else ["--worker-urls", *urls]
    results = {}
    if not case.separate_prefill:
        results["direct"] = measure(case, engines[0][1], engines[0][0], seconds)
        if peer is not None:
            for policy in PEER_POLICIES:
                results[f"vllm-router {policy}"] = measure_peer(case, peer, policy, urls, seconds)
    for flavour, more in FLAVOURS.items():
        results[f"router {flavour}"] = measure_router(case, [*flags, *more], seconds)
    return results


def measure_router(case: Case, flags: list[str], seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        router, line = start(
            ["-m", "router.cli", "--port", "0", "--ready-file", str(ready), "--log-level", "error", *flags]
        )
        try:
            if not line:
                raise RuntimeError("the router did not start")
            return measure(case, json.loads(ready.read_text())["port"], router.pid, seconds)
        finally:
            router.terminate()
            router.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1, help="the round with the least CPU counts")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--vllm-router", metavar="PATH")
    args = parser.parse_args()
    engines = [start([str(_HERE / "router_engine.py")]) for _ in range(2)]
    try:
        addresses = [(process.pid, int(line)) for process, line in engines]
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name in args.cases.split(","):
            rounds = [run_case(name, addresses, args.seconds, args.vllm_router) for _ in range(args.rounds)]
            results[name] = {
                who: min((r[who] for r in rounds), key=lambda f: f["cpu_us_per_request"]) for who in rounds[0]
            }
            for who, figures in results[name].items():
                print(
                    name, who, "  ".join(f"{key}={value:.1f}" for key, value in figures.items()), flush=True
                )
    finally:
        for process, _ in engines:
            process.terminate()
            process.wait()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
