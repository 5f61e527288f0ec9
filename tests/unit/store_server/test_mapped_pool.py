"""A pool in memory that has a name. A plain file stands for the DAX file, a tree for what sysfs says of a
device."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcore.errors import ConfigError
from store_server.config import StoreConfig
from store_server.levels import StorageLevel, cpu_path
from store_server.mapped_pool import MappedPool, device_bytes

MIB = 1 << 20


def test_the_view_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    pool = MappedPool(path, 8 * MIB + 123)
    assert len(pool.view) == pool.size_bytes == 8 * MIB
    pool.view[5 * MIB] = 7
    assert os.pread(pool.fd, 1, 5 * MIB) == b"\x07" and path.stat().st_size == 8 * MIB
    pool.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(pool.fd)
    again = MappedPool(path, 4 * MIB)
    assert again.size_bytes == 4 * MIB and path.stat().st_size == 8 * MIB
    again.close()


def test_two_stores_do_not_share_it(tmp_path: Path) -> None:
    pool = MappedPool(tmp_path / "pool", MIB)
    with pytest.raises(ConfigError, match="in use by another store"):
        MappedPool(tmp_path / "pool", MIB)
    pool.close()
    MappedPool(tmp_path / "pool", MIB).close()


def test_what_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        MappedPool(tmp_path / "no folder" / "pool", MIB)
    with pytest.raises(ConfigError, match="/dev/zero is no DAX device"):
        MappedPool(Path("/dev/zero"), MIB)
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        MappedPool(tmp_path, MIB)


def status_of(kind: int, major: int, minor: int) -> os.stat_result:
    return SimpleNamespace(st_mode=kind | 0o600, st_rdev=os.makedev(major, minor))  # type: ignore[return-value]


def test_a_device_says_how_large_it_is_and_how_it_is_mapped(tmp_path: Path) -> None:
    device = tmp_path / "251:3"
    device.mkdir()
    (device / "size").write_text("16777216\n")
    (device / "align").write_text("4194304\n")
    path, status = Path("/dev/dax0.0"), status_of(stat.S_IFCHR, 251, 3)
    assert device_bytes(path, status, 15 * MIB, tmp_path) == 12 * MIB, "whole pieces of the device's own"
    with pytest.raises(ConfigError, match=r"has 16\.0 MiB, not 17\.0 MiB"):
        device_bytes(path, status, 17 * MIB, tmp_path)
    (device / "align").unlink()
    assert device_bytes(path, status, 15 * MIB, tmp_path) == 14 * MIB


def test_a_disk_is_no_memory() -> None:
    with pytest.raises(ConfigError, match="a disk belongs to the ssd level"):
        device_bytes(Path("/dev/nvme0n1"), status_of(stat.S_IFBLK, 259, 1), MIB)


def test_the_cpu_level_may_name_a_path() -> None:
    level = StorageLevel(level="cpu", capacity="64gb", paths=("/dev/dax0.0",))
    assert cpu_path([level]) == Path("/dev/dax0.0")
    assert cpu_path([StorageLevel(level="cpu", capacity="1gb")]) is None
    with pytest.raises(ConfigError, match="not from several"):
        cpu_path([StorageLevel(level="cpu", capacity="1gb", paths=("/a", "/b"))])
    assert StoreConfig(storage_levels=[level]).dram_path() == Path("/dev/dax0.0")
    with pytest.raises(ConfigError, match="huge_pages"):
        StoreConfig(storage_levels=[level], huge_pages=True).dram_path()
