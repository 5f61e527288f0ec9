"""The pure parts of scripts/rdma-vm. That it makes a guest is what tests/rdma run in."""

import lzma
import os
import struct
import subprocess
from pathlib import Path

import pytest
from rdma_guest import cli, debs, initrd, job, qemu, uml
from rdma_guest.errors import SetupError

SIMULATION = """\
Reading package lists...
Inst libnl-3-200 (3.7.0-0.2+b1 Debian:12.11/stable [amd64])
Inst qemu-system-x86:amd64 (1:7.2 Debian:12.11/stable [amd64]) []
Conf libnl-3-200 (3.7.0-0.2+b1 Debian:12.11/stable [amd64])
"""

# As depmod writes it: behind a module stands all it needs, the innermost last.
MODULES_DEP = """\
kernel/drivers/rdma_rxe.ko: kernel/ib_core.ko kernel/net/udp_tunnel.ko kernel/net/base-udp.ko
kernel/ib_core.ko:
kernel/net/udp_tunnel.ko: kernel/net/base-udp.ko
kernel/net/base-udp.ko:
kernel/net/9p.ko: kernel/net/udp_tunnel.ko kernel/net/base-udp.ko
"""


def test_what_apt_would_install_is_read_from_its_simulation() -> None:
    assert debs.installed_by(SIMULATION) == ["libnl-3-200", "qemu-system-x86"]


def test_folders_of_old_packages_are_merged_into_usr(tmp_path: Path) -> None:
    for name in ("bin", "usr/bin", "usr/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "bin/ip").write_text("ip")
    (tmp_path / "usr/bin/tc").write_text("tc")
    (tmp_path / "lib").symlink_to("usr/lib")
    debs.merge(tmp_path)
    assert sorted(path.name for path in (tmp_path / "usr/bin").iterdir()) == ["ip", "tc"]
    assert not (tmp_path / "bin").exists() and (tmp_path / "lib").is_symlink()


def test_modules_come_after_what_they_need() -> None:
    order = [initrd.module_name(path) for path in initrd.load_order(MODULES_DEP, ["rdma_rxe", "9p"])]
    assert sorted(order) == ["9p", "base_udp", "ib_core", "rdma_rxe", "udp_tunnel"]
    for first, then in [("ib_core", "rdma_rxe"), ("udp_tunnel", "rdma_rxe"), ("base_udp", "udp_tunnel")]:
        assert order.index(first) < order.index(then)
    with pytest.raises(SetupError, match="siw"):
        initrd.load_order(MODULES_DEP, ["siw"])


def test_the_archive_is_one_that_others_can_read() -> None:
    entries = [
        initrd.Entry("bin", 0o40755),
        initrd.Entry("bin/busybox", 0o100755, b"12345"),
        initrd.Entry("dev/console", 0o20600, device=(5, 1)),
    ]
    archive = initrd.cpio(entries)
    assert len(archive) % 4 == 0
    assert _names(archive) == ["bin", "bin/busybox", "dev/console", "TRAILER!!!"]


def _names(archive: bytes) -> list[str]:
    """Walks the headers as the kernel does."""
    names, at = [], 0
    while at < len(archive):
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        size_bytes, name_bytes = fields[6], fields[11]
        names.append(archive[at + 110 : at + 110 + name_bytes - 1].decode())
        at += (110 + name_bytes + 3) & ~3
        at = (at + size_bytes + 3) & ~3
    return names


def test_the_patch_changes_one_file_and_refuses_another() -> None:
    text = "".join(before for before, _ in uml.PATCH)
    patched = uml.apply_patch(text)
    assert "host_xstate_size = iov.iov_len" in patched
    for other in (text + uml.PATCH[1][0], text.replace(uml.PATCH[2][0], "")):
        with pytest.raises(SetupError, match=r"registers\.c"):
            uml.apply_patch(other)


def test_options_that_a_kernel_does_not_take_are_named() -> None:
    config = "".join(f"CONFIG_{option}=y\n" for option in uml.OPTIONS if option != "RDMA_RXE")
    assert uml.refused_options(config + "# CONFIG_RDMA_RXE is not set\n") == ["RDMA_RXE"]


def test_a_kernel_is_found_by_its_recipe(tmp_path: Path) -> None:
    assert uml.built_kernel(tmp_path) is None
    (tmp_path / "linux-6.1.1-0123456789ab").touch()
    assert uml.built_kernel(tmp_path) is None
    for version, age_s in (("6.1.2", 50), ("6.1.3", 0), ("6.1.0", 100)):
        path = tmp_path / f"linux-{version}-{uml.recipe_digest()}"
        path.touch()
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    found = uml.built_kernel(tmp_path)
    assert found is not None and found.name.startswith("linux-6.1.3-")
    assert cli.main(["--cache", str(tmp_path), "--has-kernel"]) == 0
    assert cli.main(["--cache", str(tmp_path / "empty"), "--has-kernel"]) == 1


def test_the_kernel_is_taken_out_of_a_boot_image() -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 20
    packed = lzma.compress(elf)
    image = bytearray(4096)
    image[0x1F1] = 3
    struct.pack_into("<II", image, 0x248, 64, len(packed))
    image[4 * 512 + 64 : 4 * 512 + 64 + len(packed)] = packed
    assert qemu.elf_of(bytes(image)) == elf
    image[4 * 512 + 64] ^= 0xFF
    with pytest.raises(SetupError, match="not xz"):
        qemu.elf_of(bytes(image))


def test_a_job_survives_any_word(tmp_path: Path) -> None:
    words = ["a b", "$HOME", "'", '"', "x=y", "--"]
    run = job.Job()
    try:
        environment = job.guest_environment("uml", {"PATH": "/my bin", "SECRET": "s"}, [("K", "a 'b' $c")])
        run.write(
            ["printf", "%s\\n", *words],
            environment,
            share=tmp_path,
            layer=tmp_path,
            network="two",
            folder=tmp_path,
        )
        show = 'printf \'%s|%s|%s\\n\' "$K" "$RDMA_VM" "${SECRET-none}"'
        script = f". {run.folder}/userenv; {show}; . {run.folder}/command"
        printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        assert printed.splitlines() == ["a 'b' $c|uml|none", *words]
        assert environment["PATH"].startswith("/run/bin:/my bin:")
        assert run.status() is None
        (run.folder / "rc").write_text("3\n")
        assert run.status() == 3
    finally:
        run.close()
    assert not run.folder.exists()


def test_the_scripts_of_the_guest_are_shell() -> None:
    folder = Path(job.__file__).parent / "guest"
    scripts = sorted(folder.iterdir())
    assert [script.name for script in scripts] == ["init", "rdma-fault", "rdma-routes", "stage2"]
    for script in scripts:
        subprocess.run(["sh", "-n", script], check=True)
    refused = subprocess.run(["sh", folder / "rdma-fault", "explode"], capture_output=True, text=True)
    assert refused.returncode == 2 and "rdma-fault down|up|loss" in refused.stderr


@pytest.mark.parametrize(
    "words", [[], ["--env", "novalue", "--", "true"], ["--backend", "xen", "--", "true"]]
)
def test_wrong_words_are_explained(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(words)
    assert refused.value.code == 2 and "rdma-vm" in capsys.readouterr().err


def test_without_apt_there_is_a_status_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cp", "true"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    (tmp_path / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(debs.os, "geteuid", lambda: 1000)
    assert cli.main(["--cache", str(tmp_path / "cache"), "--", "true"]) == 125
    said = capsys.readouterr().err
    assert "no guest can be made here" in said and "sudo apt-get update" in said
    assert not list((tmp_path / "cache").glob("new-*"))
