"""Options of scripts/rdma-vm."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from suite_cache import suite_cache

from rdma_guest.backends import Backend, Start, choose
from rdma_guest.errors import SetupError, say
from rdma_guest.job import Job, guest_environment
from rdma_guest.machine import NO_STATUS, Machine
from rdma_guest.uml import built_kernel

ABOUT = """\
Run a command in a throw-away Linux guest that has soft-RoCE RDMA devices: real ibverbs, no RDMA card.

  scripts/rdma-vm -- ibv_devices                    what the guest has
  scripts/rdma-vm --time 60 -- python my_test.py    output is passed on, the exit status is the command's
  scripts/rdma-vm --setup                           only make what is needed, so that the next call is quick

The guest sees the host's whole file system, read-only under a layer of RAM: the same Python, the same virtual
environments. Only --share (default: the current folder) is written through. No network leads out of it.

In the guest there are two wires, and two network namespaces that stand for two hosts:

                  h0                          h1
  RDMA wire 0     rxe0 on rh0, 10.77.0.1      rxe1 on rh1, 10.77.0.2
  RDMA wire 1     rxe2 on rh2, 10.77.1.1      rxe3 on rh3, 10.77.1.2
  TCP             th0, 10.78.0.1              th1, 10.78.0.2

  ip netns exec h1 python server.py &         a server on one host
  ip netns exec h0 python client.py           a client on the other
  rdma-fault down rh0                         cut a wire; also: up, loss PERCENT, delay MS, clear

Devices are visible in both namespaces: use rxe0 and rxe2 in h0, rxe1 and rxe3 in h1. pyverbs (Debian's, for
Python 3.11) can be imported. There is one CPU, and a tick is 10 ms: wait for events, never spin. A process of
more than 250 MB, with torch say, must first lock its memory (docs/rdma.md says how and why).

Two kernels can be the guest: `uml`, User-Mode-Linux, an ordinary process, built once from Debian's kernel
source (about 8 minutes of CPU time, then a guest starts in a second); and `qemu`, which emulates a PC and is
about ten times slower. Neither needs root, KVM or a setting of the host. Everything is kept in the cache.

Exit status: the command's; 124 time limit reached; 125 no guest, or the guest died.
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rdma-vm",
        usage="rdma-vm [options] -- COMMAND [ARGUMENT...]",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--time", type=float, default=300, metavar="S", help="time limit in s (default: %(default)s)"
    )
    parser.add_argument("--share", type=Path, metavar="FOLDER", help="written through to the host")
    parser.add_argument(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="K=V",
        help="for the command; repeatable",
    )
    parser.add_argument(
        "--backend", choices=["auto", "uml", "qemu"], default="auto", help="auto: uml, else qemu (default)"
    )
    parser.add_argument(
        "--memory", type=int, default=1536, metavar="MIB", help="taken as it is used (default: %(default)s)"
    )
    parser.add_argument("--cpus", type=int, default=2, help="of qemu; uml has one (default: %(default)s)")
    parser.add_argument(
        "--net", choices=["two", "none"], default="two", help="none: without wires and devices"
    )
    parser.add_argument("--setup", action="store_true", help="fetch and build what is missing, run nothing")
    parser.add_argument(
        "--has-kernel", action="store_true", help="exit 0 when the uml kernel is in the cache"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="of the build (default: all CPUs)"
    )
    parser.add_argument(
        "--cache", type=Path, default=suite_cache() / "rdma-vm", metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="the kernel's log and timings on stderr")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    cache = options.cache.resolve()
    if options.has_kernel:
        return 0 if built_kernel(cache) else 1
    if not command and not options.setup:
        parser().error("no command; write it behind --")
    try:
        backend = choose(cache, options.backend, options.jobs)
    except SetupError as error:
        say(f"no guest can be made here: {error}")
        return NO_STATUS
    if options.setup:
        say(f"ready: {backend.name}")
        return 0
    return _run(backend, command, options)


def _run(backend: Backend, command: list[str], options: argparse.Namespace) -> int:
    share = (options.share or Path.cwd()).resolve()
    if not share.is_dir():
        say(f"--share {share} is not a folder")
        return NO_STATUS
    started_at = time.monotonic()
    job = Job()
    try:
        environment = guest_environment(backend.name, os.environ, options.env)
        job.write(
            command, environment, share=share, layer=backend.layer, network=options.net, folder=Path.cwd()
        )
        start = Start(options.memory, options.cpus, options.verbose, share)
        machine = Machine(*backend.command(start, job), job)
        try:
            status = machine.follow(options.time, sys.stdout.buffer)
        finally:
            machine.close()
        if options.verbose or status == NO_STATUS:
            sys.stderr.write(job.diagnosis(100_000 if options.verbose else 4000))
            say(f"{backend.name}: status {status} after {time.monotonic() - started_at:.2f} s")
        elif complaints := job.complaints():
            say(f"the guest's network is not as it should be: {complaints}")
        return status
    finally:
        job.close()


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value
