import os

import pytest

from kvcore.errors import ConfigError
from store_server import pool as pool_module
from store_server.pool import Pool

MIB = 1 << 20


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_all_memory_is_taken_at_once_and_given_back() -> None:
    pool = Pool(8 * MIB)
    assert len(pool.view) == pool.size_bytes == 8 * MIB
    assert resident_bytes(pool.fd) == 8 * MIB
    pool.view[123] = 7
    assert os.pread(pool.fd, 1, 123) == b"\x07", "the view is the file that clients map"
    pool.close()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(pool.fd)


def test_a_view_that_is_still_used_does_not_break_closing() -> None:
    pool = Pool(MIB)
    part = pool.view[10:20]
    pool.close()
    part[0] = 1


def test_kernels_that_cannot_fault_in_take_the_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_MADV_POPULATE_WRITE", 9999)
    pool = Pool(4 * MIB)
    assert resident_bytes(pool.fd) == 4 * MIB
    pool.close()


def test_a_large_pool_comes_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POPULATE_STEP_BYTES", 3 * MIB)
    pool = Pool(8 * MIB)
    assert resident_bytes(pool.fd) == 8 * MIB
    pool.close()


def test_what_does_not_fit_is_refused_with_advice() -> None:
    with pytest.raises(ConfigError, match="smaller --pool-size"):
        Pool(1 << 50)


def test_huge_pages_that_are_not_reserved_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"vm.nr_hugepages=524288"):
        Pool(1 << 40, huge_pages=True)
