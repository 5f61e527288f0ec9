"""The other way: QEMU emulates a PC (TCG, no /dev/kvm) that runs Debian's own kernel. Nothing is compiled,
and all is about ten times slower."""

import hashlib
import lzma
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rdma_guest.debs import locked, merge, missing_closure, unpacked
from rdma_guest.errors import SetupError

_ROOTS = ("qemu-system-x86", "kmod", "seabios")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_SETUP_SECTS, _PAYLOAD_OFFSET = 0x1F1, 0x248  # of the boot header (Documentation/x86/boot.rst)


class Qemu(NamedTuple):
    """`programs`: the unpacked packages; `modules`: /lib/modules/VERSION of the kernel."""

    programs: Path
    kernel: Path
    modules: Path


def setup(cache: Path) -> Qemu:
    """SetupError when the packages cannot be had."""
    programs = unpacked(
        cache, "qemu", _remembered(cache, "qemu.packages", lambda: missing_closure(_ROOTS)), merge
    )
    kernel_package = _remembered(cache, "kernel.packages", lambda: [_kernel_package()])
    tree = unpacked(cache, "kernel", kernel_package)
    modules = next(tree.glob("lib/modules/*"))
    kernel = tree / "vmlinux"
    with locked(cache / "kernel.lock"):
        if not kernel.exists():
            depmod = tree / "depmod"
            depmod.unlink(missing_ok=True)
            depmod.symlink_to(programs / "usr/bin/kmod")
            environment = {**os.environ, "LD_LIBRARY_PATH": str(programs / _LIBRARIES)}
            subprocess.run([depmod, "-b", tree, modules.name], check=True, env=environment)
            partial = kernel.with_suffix(".partial")
            partial.write_bytes(elf_of(next(tree.glob("boot/vmlinuz-*")).read_bytes()))
            partial.rename(kernel)
    return Qemu(programs, kernel, modules)


def command(
    qemu: Qemu, initrd: Path, *, memory_mib: int, cpus: int, quiet: str, mounts: dict[str, tuple[Path, bool]]
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment. `mounts`: tag to (folder of the host, writable)."""
    programs = qemu.programs
    arguments = [
        str(programs / "usr/bin/qemu-system-x86_64"),
        *("-L", str(programs / "usr/share/qemu"), "-L", str(programs / "usr/share/seabios")),
        *("-M", "pc,usb=off,vmport=off", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"),
        *("-smp", str(cpus), "-m", str(memory_mib), "-nodefaults", "-no-user-config", "-display", "none"),
        *("-no-reboot", "-serial", "stdio", "-kernel", str(qemu.kernel), "-initrd", str(initrd)),
        "-append",
        f"console=ttyS0 {quiet} panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable rv.be=qemu",
    ]
    for tag, (folder, writable) in mounts.items():
        access = "" if writable else ",readonly=on"
        share = f"local,id={tag},path={folder},security_model=none,multidevs=remap{access}"
        arguments += ["-fsdev", share, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    return arguments, {**os.environ, "LD_LIBRARY_PATH": str(programs / _LIBRARIES)}


def elf_of(bzimage: bytes) -> bytes:
    """The ELF kernel inside: QEMU starts that directly (PVH), which spares the guest the unpacking."""
    offset, size_bytes = struct.unpack_from("<II", bzimage, _PAYLOAD_OFFSET)
    begin = ((bzimage[_SETUP_SECTS] or 4) + 1) * 512 + offset
    payload = bzimage[begin : begin + size_bytes]
    if not payload.startswith(b"\xfd7zXZ\0"):
        raise SetupError("Debian's kernel is packed in a way that rdma_guest/qemu.py does not know (not xz)")
    return lzma.LZMADecompressor().decompress(payload)


def _remembered(cache: Path, name: str, find: Callable[[], list[str]]) -> list[str]:
    """Package names as they were when first asked: what is unpacked stays good when the lists move on."""
    path = cache / name
    if not path.exists():
        found = " ".join(find())
        partial = path.with_suffix(f".{hashlib.sha256(found.encode()).hexdigest()[:8]}")
        partial.write_text(found)
        partial.rename(path)
    return path.read_text().split()


def _kernel_package() -> str:
    answer = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True)
    for line in answer.stdout.splitlines():
        if "Depends:" in line and "linux-image-" in line:
            return line.split()[-1]
    raise SetupError("apt knows no linux-image-amd64: run `apt-get update` (the guest needs Debian 12)")
