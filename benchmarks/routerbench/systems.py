"""Who is measured: ours in several settings, the routers of vLLM and SGLang, and no router at all."""

import contextlib
import http.client
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from storebench.peers import venv_python
from storebench.processes import Process, SystemFailed, free_port

from routerbench.cases import Case

_READY_TIMEOUT_S = 60.0
DIRECT = "direct"
# Reads every prompt (as text), looks it up, predicts, and checks SLOs that nobody misses.
_ALGORITHM1 = (
    *("--policy", "global_cache_aware", "--decode-policy", "least_tbt"),
    *("--admission", "early", "--ttft-slo-ms", "1000000000", "--tpot-slo-ms", "1000000000"),
)


class System(msgspec.Struct, frozen=True):
    """`command`: (port, engine URLs) to its argument list; it may install the program first. `prompts`: worth
    measuring with long ones only, since it differs in nothing else from another one here."""

    name: str
    about: str
    command: Callable[[int, Sequence[str]], list[str | Path]]
    separate_prefill: bool = False
    only_prompts: bool = False

    def takes(self, case: Case) -> bool:
        if self.separate_prefill != case.separate_prefill:
            return False
        return case.prompt_bytes >= 1024 or not self.only_prompts


def _ours(*flags: str) -> Callable[[int, Sequence[str]], list[str | Path]]:
    def command(port: int, urls: Sequence[str]) -> list[str | Path]:
        router = [sys.executable, "-m", "router.cli", "--port", str(port), "--log-level", "error"]
        return [*router, "--worker-urls", *urls, *flags]

    return command


def _ours_split(port: int, urls: Sequence[str]) -> list[str | Path]:
    router = [sys.executable, "-m", "router.cli", "--port", str(port), "--log-level", "error"]
    return [*router, "--prefill", urls[0], "--decode", urls[1], *_ALGORITHM1]


def _peer(
    requirement: str, program: Sequence[str], policy: str
) -> Callable[[int, Sequence[str]], list[str | Path]]:
    def command(port: int, urls: Sequence[str]) -> list[str | Path]:
        python = venv_python(requirement.replace("==", "-"), [[requirement]])
        peer: list[str | Path] = [python.parent / program[0], *program[1:], "--host", "127.0.0.1"]
        flags = ["--port", str(port), "--prometheus-port", str(free_port()), "--log-level", "error"]
        return [*peer, *flags, "--policy", policy, "--worker-urls", *urls]

    return command


OURS = (
    System("ours round_robin", "mooncake-router, no prompt is read", _ours()),
    System(
        "ours", "mooncake-router with Algorithm 1, index and admission, prompts as text", _ours(*_ALGORITHM1)
    ),
    System("ours split", "the same with a prefill and a decode engine", _ours_split, separate_prefill=True),
)
_PROGRAMS = {
    "vllm-router": ("vllm-router==0.1.17", ["vllm-router"]),
    "sglang-router": ("sglang-router==0.3.2", ["sglang-router", "launch"]),
}
PEERS = {
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
