"""Who is measured, and the processes they run in."""

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from routerbench.ours import package_folder
from storebench.peers import venv_python
from storebench.processes import Process, SystemFailed

_BENCHMARKS = Path(__file__).resolve().parents[1]
_ANSWER_TIMEOUT_S = 120.0
_DYNAMO = "ai-dynamo-runtime==1.6.1"


class System(msgspec.Struct, frozen=True):
    """`command`: interpreter and folders to import from; it may install or build first."""

    name: str
    about: str
    module: str
    command: Callable[[], tuple[str, Sequence[Path]]]
    environment: Mapping[str, str] = {}


def _ours(compiled: bool) -> Callable[[], tuple[str, Sequence[Path]]]:
    return lambda: (sys.executable, [package_folder(compiled=compiled), _BENCHMARKS])


def _dynamo() -> tuple[str, Sequence[Path]]:
    python = venv_python(_DYNAMO.replace("==", "-"), [[_DYNAMO, "xxhash==4.1.0"]])
    return str(python), [_BENCHMARKS]


OURS, COMPILED = "ours", "ours compiled"
SYSTEMS = (
    System(OURS, "mooncake-router's core in plain Python", "corebench.ours", _ours(compiled=False)),
    System(COMPILED, "the same modules, compiled", "corebench.ours", _ours(compiled=True)),
)
PEERS = {
    # Its own log would be a line for each choice.
    "dynamo": System(
        "dynamo", f"{_DYNAMO}, by its Python API", "corebench.dynamo_router", _dynamo, {"DYN_LOG": "error"}
    )
}


class Subject:
    """A system in a process of its own. SystemFailed for whatever it cannot do."""

    def __init__(self, system: System, log_path: Path) -> None:
        self.system = system
        python, folders = system.command()
        paths = os.pathsep.join(map(str, folders))
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = Process(
                [python, "-m", system.module, "--control-fd", str(theirs.fileno())],
                log_path,
                # Safe path: the current directory must not come before what is named here.
                environment={**system.environment, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1"},
                pass_fds=[theirs.fileno()],
            )
        self._control.settimeout(_ANSWER_TIMEOUT_S)
        self._stream = self._control.makefile("rw", encoding="utf-8")

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: object) -> Any:
        try:
            self._stream.write(json.dumps({"call": method, "arguments": arguments}) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError as error:
            raise SystemFailed(f"no answer ({error}):\n{self._process.log_tail()}") from error
        if not line:
            raise SystemFailed(f"its process has ended:\n{self._process.log_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SystemFailed(answer["error"])
        return answer["result"]

    def depths(self, token_ids: Sequence[int]) -> dict[int, int]:
        """Leading blocks of the prompt that each worker holds, by its events."""
        return {int(worker): depth for worker, depth in self.call("depths", token_ids).items()}

    def close(self) -> None:
        # End of file is its sign to leave.
        self._stream.close()
        self._control.close()
        self._process.wait_end()
