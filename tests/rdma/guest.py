"""The guest that scripts/rdma-vm makes, seen from a test: two hosts, their devices, and wires to cut."""

import ctypes
import fcntl
import functools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class GuestHost(NamedTuple):
    """`address` is that of its TCP, `devices` are its RDMA devices, one on each wire."""

    name: str
    address: str
    devices: tuple[str, str]

    @property
    def enter(self) -> list[str]:
        """Words in front of a command that is to run on this host."""
        return ["ip", "netns", "exec", self.name]


CLIENT_HOST = GuestHost("h0", "10.78.0.1", ("rxe0", "rxe2"))
"""Where the tests themselves run."""
SERVER_HOST = GuestHost("h1", "10.78.0.2", ("rxe1", "rxe3"))
WIRES = (("rh0", "rh1"), ("rh2", "rh3"))
"""Interfaces at the client's and at the server's end."""
RDMA_INTERFACES = tuple(interface for wire in WIRES for interface in wire)

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_INTERFACE_FLAGS = struct.Struct("16sh14x")


class Faults:
    """As rdma-fault, but `down` starts no process: those are dear here. `mend` puts back what has been
    broken."""

    def __init__(self) -> None:
        self._down: set[str] = set()
        self._disturbed: set[str] = set()

    def down(self, *interfaces: str) -> None:
        """Ends of wires between RDMA devices. At once: what is under way does not get much further."""
        self._down.update(interfaces or RDMA_INTERFACES)
        for interface in interfaces or RDMA_INTERFACES:
            _set_down(interface)

    def up(self, *interfaces: str) -> None:
        self._down.difference_update(interfaces or RDMA_INTERFACES)
        self._run("up", *interfaces)

    def loss(self, percent: float, *interfaces: str) -> None:
        self._disturbed.update(interfaces or RDMA_INTERFACES)
        self._run("loss", str(percent), *interfaces)

    def delay(self, delay_ms: float, *interfaces: str) -> None:
        self._disturbed.update(interfaces or RDMA_INTERFACES)
        self._run("delay", str(delay_ms), *interfaces)

    def mend(self) -> None:
        if self._disturbed:
            self._run("clear", *self._disturbed)
            self._disturbed.clear()
        if self._down:
            self.up(*self._down)

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(["rdma-fault", *words], check=True)


@functools.cache
def _socket_beside_the_wires() -> socket.socket:
    """In the namespace of the wires, where it stays; only the thread that makes it has to go there."""
    made: list[socket.socket] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/1/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def _set_down(interface: str) -> None:
    wires = _socket_beside_the_wires()
    asked = _INTERFACE_FLAGS.pack(interface.encode(), 0)
    name, flags = _INTERFACE_FLAGS.unpack(fcntl.ioctl(wires, _SIOCGIFFLAGS, asked))
    fcntl.ioctl(wires, _SIOCSIFFLAGS, _INTERFACE_FLAGS.pack(name, flags & ~_IFF_UP))


@contextmanager
def python_on(host: GuestHost, program: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """A Python program on `host`, its stdin and stdout as pipes; killed at the end if it has not ended."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [*host.enter, sys.executable, str(program), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def count_rdma(kind: str) -> int:
    """How many `kind` (qp, cq, mr, pd) of user space there are in the whole guest."""
    shown = subprocess.run(["rdma", "resource", "show", kind], capture_output=True, text=True, check=True)
    return sum(" pid " in line for line in shown.stdout.splitlines())
