"""Who is measured: ours in several settings, vllm-router, sglang-router, smg, bare relays, and no router."""

import contextlib
import hashlib
import http.client
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from storebench.peers import cache_dir, venv_python
from storebench.processes import Process, SystemFailed, free_port

from routerbench.cases import Case
from routerbench.ours import router_command

_READY_TIMEOUT_S = 60.0
_FOLDER = Path(__file__).resolve().parent
DIRECT = "direct"
VLLM_ROUTER_BY_PREFIX = "vllm-router cache_aware scale-out"
# Reads every prompt (as text), looks it up, predicts, and checks SLOs that nobody misses.
_ALGORITHM1 = (
    *("--policy", "global_cache_aware", "--decode-policy", "least_tbt"),
    *("--admission", "early", "--ttft-slo-ms", "1000000000", "--tpot-slo-ms", "1000000000"),
)


class System(msgspec.Struct, frozen=True):
    """`command`: (port, engine URLs) to its argument list; it may install the program first. `only_prompts`:
    worth measuring with long ones only, since it differs in nothing else from another one here. `scale_out`:
    in front of engines that render prompts into token ids (engine_api.py)."""

    name: str
    about: str
    command: Callable[[int, Sequence[str]], list[str | Path]]
    separate_prefill: bool = False
    only_prompts: bool = False
    scale_out: bool = False

    def takes(self, case: Case) -> bool:
        if self.separate_prefill != case.separate_prefill:
            return False
        return case.has_prompts or not self.only_prompts


def _router(port: int, *, compiled: bool) -> list[str | Path]:
    return [*router_command(compiled=compiled), "--port", str(port), "--log-level", "error"]


def _ours(*flags: str, compiled: bool = True) -> Callable[[int, Sequence[str]], list[str | Path]]:
    def command(port: int, urls: Sequence[str]) -> list[str | Path]:
        return [*_router(port, compiled=compiled), "--worker-urls", *urls, *flags]

    return command


def _ours_split(port: int, urls: Sequence[str]) -> list[str | Path]:
    return [*_router(port, compiled=True), "--prefill", urls[0], "--decode", urls[1], *_ALGORITHM1]


def _peer(
    requirement: str, program: Sequence[str], policy: str
) -> Callable[[int, Sequence[str]], list[str | Path]]:
    def command(port: int, urls: Sequence[str]) -> list[str | Path]:
        python = venv_python(requirement.replace("==", "-"), [[requirement]])
        peer: list[str | Path] = [python.parent / program[0], *program[1:], "--host", "127.0.0.1"]
        flags = ["--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "error"]
        return [*peer, *flags, "--policy", policy, "--worker-urls", *urls]

    return command


def _ports(urls: Sequence[str]) -> list[str]:
    return [url.rpartition(":")[2] for url in urls]


def _relay(port: int, urls: Sequence[str]) -> list[str | Path]:
    return [sys.executable, _FOLDER / "relay.py", str(port), *_ports(urls)]


def _relay_in_c(port: int, urls: Sequence[str]) -> list[str | Path]:
    source = _FOLDER / "relay.c"
    program = cache_dir() / f"relay-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        compiler = shutil.which("cc")
        if compiler is None:
            raise SystemFailed("there is no C compiler (cc) to make it with")
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(f".{port}")
        command = [compiler, "-O2", "-Wall", "-o", str(unfinished), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemFailed(f"{compiler} refused relay.c:\n{done.stderr}")
        unfinished.replace(program)
    return [program, str(port), *_ports(urls)]


OURS = (
    System("ours round_robin", "mooncake-router, compiled; no prompt is read", _ours()),
    System("ours", "the same with Algorithm 1, index and admission, prompts as text", _ours(*_ALGORITHM1)),
    System("ours in plain Python", "the same, not compiled", _ours(*_ALGORITHM1, compiled=False)),
    System(
        "ours split",
        "compiled, Algorithm 1, with a prefill and a decode engine",
        _ours_split,
        separate_prefill=True,
    ),
)
# Nobody in the path of the bytes can take less: in C what the kernel takes, in Python what uvloop adds to it.
FLOORS = (
    System("relay in C", "no router: recv, send and epoll_wait", _relay_in_c),
    System("relay in Python", "no router: protocols on uvloop that write what they read", _relay),
)
_PROGRAMS = {
    "vllm-router": ("vllm-router==0.1.17", ["vllm-router"]),
    "sglang-router": ("sglang-router==0.3.2", ["sglang-router", "launch"]),
    "smg": ("smg==1.13.0", ["smg", "launch"]),  # what sglang-router has become
}
PEERS: dict[str, tuple[System, ...]] = {
    name: (
        System(f"{name} rr", f"{requirement}, round_robin", _peer(requirement, program, "round_robin")),
        System(
            f"{name} cache_aware",
            f"{requirement}, cache_aware",
            _peer(requirement, program, "cache_aware"),
            only_prompts=True,
        ),
    )
    for name, (requirement, program) in _PROGRAMS.items()
}
# Its tree is one of token ids, which it asks every engine for, for every request. `vllm serve` without
# --enable-scale-out gives it none, and then it routes without looking at prompts.
_vllm_requirement, _vllm_program = _PROGRAMS["vllm-router"]
PEERS["vllm-router"] += (
    System(
        VLLM_ROUTER_BY_PREFIX,
        f"{_vllm_requirement}, cache_aware, engines that render prompts (--enable-scale-out)",
        _peer(_vllm_requirement, _vllm_program, "cache_aware"),
        only_prompts=True,
        scale_out=True,
    ),
)


class Running:
    """A system that answers. SystemFailed when it does not come to that."""

    def __init__(self, system: System, urls: Sequence[str], log_path: Path) -> None:
        self.system = system
        self.port = free_port()
        self._process = Process(system.command(self.port, urls), log_path)
        try:
            self._process.wait_until(lambda: _answers(self.port), _READY_TIMEOUT_S, system.name)
        except SystemFailed:
            self._process.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.stop()


def _answers(port: int) -> bool:
    """Some listen before they know their engines."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection):
            body = b'{"model": "mock", "messages": [{"role": "user", "content": "ready?"}]}'
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            return connection.getresponse().status == 200
    return False
