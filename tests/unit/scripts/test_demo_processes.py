"""What the demo starts, it ends: also children of children, also when something goes wrong."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest
from demo_lib.processes import DemoError, Processes, free_ports

DEADLINE_S = 20.0

# A parent whose child ignores SIGTERM and outlives it.
PARENT = """
import subprocess, sys, time
child = "from signal import *; signal(SIGTERM, SIG_IGN); print(1, flush=True); import time; time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and only waiting for whoever inherited it


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_ends_parents_and_their_children(tmp_path: Path, fails: bool) -> None:
    pids: list[int] = []
    try:
        with Processes(tmp_path) as processes:
            parent = processes.start("parent", [sys.executable, "-c", PARENT], {})
            wait_until(lambda: parent.log.read_text().endswith("\n"))
            pids = [parent.process.pid, int(parent.log.read_text())]
            assert all(is_running(pid) for pid in pids)
            if fails:
                raise DemoError("something went wrong")
    except DemoError:
        assert fails
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def test_kept_processes_stay(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        sleeper = processes.start("sleeper", ["sleep", "600"], {})
        processes.keep()
    assert is_running(sleeper.process.pid)
    processes.stop_all()
    assert not is_running(sleeper.process.pid)


def test_a_death_while_waiting_shows_the_end_of_the_log(tmp_path: Path) -> None:
    code = "import os, sys; print('no such model', os.environ['WHICH'], flush=True); sys.exit(3)"
    with Processes(tmp_path) as processes:
        processes.start("engine", [sys.executable, "-c", code], {"WHICH": "tiny"})
        with pytest.raises(DemoError, match=r"(?s)engine ended with exit status 3.*no such model tiny"):
            processes.wait_until_ready({"engine": "http://127.0.0.1:9/health"}, DEADLINE_S, print)


def test_never_ready_is_an_error_that_names_who(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        processes.start("store", ["sleep", "600"], dict(os.environ))
        with pytest.raises(DemoError, match="store was not ready within 0 s"):
            processes.wait_until_ready({"store": "http://127.0.0.1:9/ready"}, 0.0, print)


def test_free_ports_can_be_bound_and_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    for port in ports:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
