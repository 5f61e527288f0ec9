"""A User-Mode-Linux kernel with soft-RoCE, built once from Debian's linux-source.

It is an ordinary process: no /dev/kvm, user code at native speed, one CPU. Debian's own package
`user-mode-linux` is no help, since its configuration rules InfiniBand out (NO_IOMEM).
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from rdma_guest.debs import locked, unpacked
from rdma_guest.errors import SetupError, say

SOURCE_PACKAGE = "linux-source-6.1"
TOOL_PACKAGES = ("flex", "bison", "m4", "bc", "xz-utils", "libfl2", "libsigsegv2")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_SAY_EVERY_S = 30.0

OPTIONS = tuple(
    word
    for line in Path(__file__).with_name("kernel.options").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
)
_FIXED = "CONFIG_UML_PCI_OVER_VIRTIO_DEVICE_ID=1234\n"

# UML 6.1 hands PTRACE_SETREGSET a fixed XSAVE area of 2696 bytes. The host wants its whole one, 11008 bytes
# on a CPU with AMX, and every guest dies at once ("ptrace set fp regs failed, errno = 14"). So ask the host
# for its size and pad with zeroes: tile data is never in use, since a guest cannot ask for AMX.
PATCHED_FILE = "arch/x86/um/os-Linux/registers.c"
PATCH = (
    ("#include <stdlib.h>\n", "#include <stdlib.h>\n#include <string.h>\n"),
    (
        "int have_xstate_support;\n",
        "int have_xstate_support;\n"
        "static char full_xstate[65536] __attribute__((aligned(64)));\n"
        "static unsigned long host_xstate_size;\n",
    ),
    (
        "\t\tif (ptrace(PTRACE_SETREGSET,",
        "\t\tif (host_xstate_size > iov.iov_len) {\n"
        "\t\t\tmemcpy(full_xstate, fp_regs, iov.iov_len);\n"
        "\t\t\tiov.iov_base = full_xstate;\n"
        "\t\t\tiov.iov_len = host_xstate_size;\n"
        "\t\t}\n"
        "\t\tif (ptrace(PTRACE_SETREGSET,",
    ),
    (
        "\t\thave_xstate_support = 1;\n",
        "\t\thave_xstate_support = 1;\n"
        "\tiov.iov_base = full_xstate;\n"
        "\tiov.iov_len = sizeof(full_xstate);\n"
        "\tif (ptrace(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &iov) == 0)\n"
        "\t\thost_xstate_size = iov.iov_len;\n"
        "\tmemset(full_xstate, 0, sizeof(full_xstate));\n",
    ),
)


def recipe_digest() -> str:
    """Of everything that makes a kernel what it is, beside the version of its source."""
    return hashlib.sha256(repr((SOURCE_PACKAGE, OPTIONS, _FIXED, PATCH)).encode()).hexdigest()[:12]


def built_kernel(cache: Path) -> Path | None:
    """The newest kernel in the cache that was made by this recipe. An update of the source package alone is
    no reason to build again: guests live for minutes and are reached by nobody."""
    found = cache.glob(f"linux-*-{recipe_digest()}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def build(cache: Path, jobs: int) -> Path:
    """The kernel, built if the cache has none: about eight minutes of CPU time and 2 GB of disk meanwhile.
    SetupError when it cannot be built; the log then stays in the cache."""
    with locked(cache / "uml.lock"):
        kernel = built_kernel(cache)
        if kernel is not None:
            return kernel
        for tool in ("gcc", "make"):
            if shutil.which(tool) is None:
                raise SetupError(f"its kernel is built with {tool}: apt-get install gcc make libc6-dev")
        tools = unpacked(cache, "kernel-tools", TOOL_PACKAGES)
        source_package = unpacked(cache, "kernel-source", (SOURCE_PACKAGE,))
        with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as work:
            kernel = _build(cache, tools, source_package, Path(work), jobs)
        shutil.rmtree(source_package)
        shutil.rmtree(tools)
        return kernel


def _build(cache: Path, tools: Path, source_package: Path, work: Path, jobs: int) -> Path:
    environment = {
        **os.environ,
        "PATH": f"{tools}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{tools}/{_LIBRARIES}",
        "M4": f"{tools}/usr/bin/m4",
        "BISON_PKGDATADIR": f"{tools}/usr/share/bison",
        "KCONFIG_ALLCONFIG": str(work / "config"),
    }
    log = cache / "uml-build.log"
    say(f"building a User-Mode-Linux kernel, once (log: {log})")
    with log.open("wb") as output:

        def run(*command: str, folder: Path = work) -> None:
            _watch(subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output), log)

        run("tar", "xf", str(next(source_package.glob("usr/src/*.tar.xz"))))
        source = next(work.glob("linux-source-*"))
        patched = source / PATCHED_FILE
        patched.write_text(apply_patch(patched.read_text()))
        wanted = "".join(f"CONFIG_{option}=y\n" for option in OPTIONS)
        (work / "config").write_text(wanted + _FIXED)
        make = ("make", "ARCH=um", "SUBARCH=x86_64")
        run(*make, "allnoconfig", folder=source)
        if refused := refused_options((source / ".config").read_text()):
            raise SetupError(f"this kernel does not take the options {', '.join(refused)}")
        run(*make, f"-j{jobs}", "linux", folder=source)
        run("strip", "-o", "linux", str(source / "linux"))
        version = subprocess.run([work / "linux", "--version"], capture_output=True, text=True).stdout.strip()
        kernel = cache / f"linux-{version or 'unknown'}-{recipe_digest()}"
        return (work / "linux").rename(kernel)


def apply_patch(text: str) -> str:
    """SetupError when the file is not the one the patch was made for."""
    for before, after in PATCH:
        if text.count(before) != 1:
            raise SetupError(
                f"{PATCHED_FILE} of {SOURCE_PACKAGE} is not what the patch in uml.py was made for"
            )
        text = text.replace(before, after)
    return text


def refused_options(config: str) -> list[str]:
    taken = set(re.findall(r"^CONFIG_(\w+)=y$", config, re.MULTILINE))
    return [option for option in OPTIONS if option not in taken]


def _watch(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Waits, and says now and then how far it is."""
    told_at = time.monotonic()
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - told_at > _SAY_EVERY_S:
                told_at = time.monotonic()
                say(f"  {log.read_bytes().count(b'  CC ')} files compiled")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        tail = log.read_text(errors="replace").splitlines()[-5:]
        raise SetupError("\n".join([f"the kernel could not be built; the whole log is {log}", *tail]))
