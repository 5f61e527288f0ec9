"""The archive a guest's kernel starts from: busybox, guest/init, and kernel modules if there are any."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rdma_guest.errors import SetupError

_FOLDERS = ("bin", "mod", "dev", "proc", "sys", "host", "new", "job", "rw", "layer")
_FOLDER_MODE, _PROGRAM_MODE, _FILE_MODE, _CONSOLE_MODE = 0o40755, 0o100755, 0o100644, 0o20600

# What the guest loads, in this order, each after what it depends on. rxe asks the crypto API for crc32, which
# modules.dep does not know: without it `rdma link add` answers "No such file or directory".
MODULES = (
    "virtio_pci",
    "9p",
    "9pnet_virtio",
    "overlay",
    "veth",
    "crc32_generic",
    "rdma_rxe",
    "rdma_ucm",
    "ib_umad",
    "sch_netem",
)


class Entry(NamedTuple):
    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def cpio(entries: Iterable[Entry]) -> bytes:
    """The archive in the "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    archive = bytearray()
    for inode, entry in enumerate([*entries, Entry("TRAILER!!!", 0)], start=1):
        name = entry.name.encode() + b"\0"
        fields = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        archive += bytes(-len(archive) % 4) + entry.data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


def load_order(modules_dep: str, wanted: Sequence[str]) -> list[str]:
    """Paths of modules so that each comes after what it needs. `modules_dep`: the text of that file."""
    needs: dict[str, tuple[str, list[str]]] = {}
    for line in modules_dep.splitlines():
        path, _, rest = line.partition(":")
        needs[module_name(path)] = (path, rest.split())
    order: list[str] = []
    for name in wanted:
        if name not in needs:
            raise SetupError(f"the kernel package has no module {name}")
        path, dependencies = needs[name]
        order += [step for step in [*reversed(dependencies), path] if step not in order]
    return order


def module_name(path: str) -> str:
    return path.rsplit("/", 1)[-1].split(".")[0].replace("-", "_")


def write_initrd(cache: Path, layer: Path, init: bytes, module_folder: Path | None = None) -> Path:
    """`module_folder`: /lib/modules/VERSION of a kernel that has its drivers as modules."""
    entries = [Entry(name, _FOLDER_MODE) for name in _FOLDERS]
    entries.append(Entry("dev/console", _CONSOLE_MODE, device=(5, 1)))
    entries.append(Entry("bin/busybox", _PROGRAM_MODE, (layer / "usr/bin/busybox").read_bytes()))
    entries.append(Entry("init", _PROGRAM_MODE, init))
    if module_folder is not None:
        order = load_order((module_folder / "modules.dep").read_text(), MODULES)
        names = [path.rsplit("/", 1)[-1] for path in order]
        entries += [
            Entry(f"mod/{name}", _FILE_MODE, (module_folder / path).read_bytes())
            for name, path in zip(names, order, strict=True)
        ]
        entries.append(Entry("mod/order", _FILE_MODE, "\n".join(names).encode()))
    data = cpio(entries)
    path = cache / f"initrd-{hashlib.sha256(data).hexdigest()[:12]}.cpio"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(data)
        partial.rename(path)
    return path
