"""Which kernel runs the guest, and why."""

import io
import os
from pathlib import Path
from typing import NamedTuple, Protocol

from rdma_guest import qemu, uml
from rdma_guest.debs import merge, missing_closure, unpacked
from rdma_guest.errors import SetupError, say
from rdma_guest.initrd import write_initrd
from rdma_guest.job import PYTHON_FOLDER, Job, init_program, memory_folder
from rdma_guest.machine import Machine

_PROBE_LIMIT_S = 120.0
_PROBE_MEMORY_MIB = 256

# busybox has no library to miss; libibverbs finds librxe among the providers.
_LAYER_ROOTS = (
    "busybox-static",
    "iproute2",
    "util-linux",
    "libibverbs1",
    "ibverbs-providers",
    "librdmacm1",
    "libnl-3-200",
    "libnl-route-3-200",
    "ibverbs-utils",
)
# Not among the roots, because it wants Debian's own Python, which the guest does not need.
_PYVERBS = "python3-pyverbs"


class Start(NamedTuple):
    """How much of the machine a guest gets, and what it sees of the host beside its root."""

    memory_mib: int
    cpus: int
    verbose: bool
    share: Path


class Backend(Protocol):
    name: str
    layer: Path

    def command(self, start: Start, job: Job) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of the process that is the guest."""
        ...


class Uml:
    name = "uml"

    def __init__(self, cache: Path, layer: Path, kernel: Path) -> None:
        self.layer = layer
        self._kernel = kernel
        self._initrd = write_initrd(cache, layer, init_program())

    def command(self, start: Start, job: Job) -> tuple[list[str], dict[str, str]]:
        arguments = [
            str(self._kernel),
            *(f"mem={start.memory_mib}M", f"initrd={self._initrd}", "root=/dev/ram0", "panic=-1"),
            *("con=null", "con0=null,fd:1", "ssl=null"),
            *(f"umid={job.folder.name}", f"uml_dir={job.folder}/uml/"),
            *(_loudness(start), "rv.be=uml", f"rv.job={job.folder}"),
        ]
        return arguments, {**os.environ, "TMPDIR": memory_folder(start.memory_mib << 20)}


class Qemu:
    name = "qemu"

    def __init__(self, cache: Path, layer: Path) -> None:
        self.layer = layer
        self._qemu = qemu.setup(cache)
        self._initrd = write_initrd(cache, layer, init_program(), self._qemu.modules)

    def command(self, start: Start, job: Job) -> tuple[list[str], dict[str, str]]:
        mounts = {
            "root": (Path("/"), False),
            "layer": (self.layer, False),
            "job": (job.folder, True),
            "share": (start.share, True),
        }
        return qemu.command(
            self._qemu,
            self._initrd,
            memory_mib=start.memory_mib,
            cpus=start.cpus,
            quiet=_loudness(start),
            mounts=mounts,
        )


def choose(cache: Path, wanted: str, jobs: int) -> Backend:
    """`wanted`: uml, qemu, or auto, which takes uml and falls back to qemu with a line that says why.

    Makes what is not in the cache. SetupError when the wanted one cannot be had.
    """
    cache.mkdir(parents=True, exist_ok=True)
    layer = _layer(cache)
    if wanted != "qemu":
        try:
            return _working_uml(cache, layer, uml.build(cache, jobs))
        except SetupError as error:
            if wanted == "uml":
                raise
            say(f"no User-Mode-Linux here, so QEMU has to do, which is slower: {error}")
    return Qemu(cache, layer)


def _working_uml(cache: Path, layer: Path, kernel: Path) -> Uml:
    """SetupError when this kernel does not start on this machine; looked at once."""
    backend = Uml(cache, layer, kernel)
    stamp = kernel.with_name(f"{kernel.name}.works")
    if stamp.exists():
        return backend
    job = Job()
    try:
        start = Start(_PROBE_MEMORY_MIB, cpus=1, verbose=True, share=job.folder)
        job.write(["true"], {}, share=job.folder, layer=layer, network="none", folder=Path("/"))
        machine = Machine(*backend.command(start, job), job)
        try:
            status = machine.follow(_PROBE_LIMIT_S, io.BytesIO())
        finally:
            machine.close()
        if status:
            raise SetupError(f"{kernel.name} does not start on this machine:\n{job.diagnosis(1000)}")
    finally:
        job.close()
    stamp.touch()
    return backend


def _layer(cache: Path) -> Path:
    known = next(iter(sorted(cache.glob("layer-*[0-9a-f]"))), None)
    if known is not None:
        return known
    return unpacked(cache, "layer", [*missing_closure(_LAYER_ROOTS), _PYVERBS], _finish_layer)


def _finish_layer(tree: Path) -> None:
    merge(tree)
    folder = tree / PYTHON_FOLDER.lstrip("/")
    folder.mkdir(parents=True)
    (tree / "usr/lib/python3/dist-packages/pyverbs").rename(folder / "pyverbs")


def _loudness(start: Start) -> str:
    return "ignore_loglevel" if start.verbose else "quiet"
