"""The whole path with real client processes, on systems that need no server."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from storebench import peers
from storebench.clients import ClientSpec
from storebench.plan import KIB, Budget, Cell
from storebench.processes import Process, SystemFailed, cpu_seconds
from storebench.runner import Runner
from storebench.systems.memcpy import Memcpy, MemcpyDriver
from storebench.systems.raw_tcp import RawTcp
from storebench.systems.redis import Redis

TINY = Budget(rounds=2, phase_s=5, sizes_bytes=(4 * KIB, 64 * KIB), max_calls=8)


class CorruptDriver(MemcpyDriver):
    """Delivers one wrong byte with every value."""

    def get(self, key: bytes, offset: int, size_bytes: int) -> bool:
        super().get(key, offset, size_bytes)
        self._buffers[1][offset] ^= 1
        return True


class DyingDriver(MemcpyDriver):
    def batch_put(self, keys: Sequence[bytes], offsets: Sequence[int], size_bytes: int) -> bool:
        os._exit(3)


class Variant(Memcpy):
    """memcpy with one of the drivers above."""

    def __init__(self, driver: type[MemcpyDriver]) -> None:
        self.name = driver.__name__

    def client(self) -> ClientSpec:
        return (
            super()
            .client()
            ._replace(driver=f"{Path(__file__).stem}:{self.name}", python_path=(Path(__file__).parent,))
        )


def run(systems, work_dir: Path, budget: Budget = TINY):
    steps: list[str] = []
    texts: list[str] = []
    runner = Runner(budget, work_dir, advance=steps.append, report=texts.append)
    figures = runner.run(systems)
    assert len(steps) == runner.num_steps(systems)
    assert len(texts) == len(runner.failed)
    return figures, runner.failed


@pytest.mark.slow
def test_baselines_give_figures_for_every_cell_and_right_bytes(tmp_path: Path) -> None:
    raw, memcpy = RawTcp(), Memcpy()
    figures, failed = run([raw, memcpy], tmp_path)
    assert failed == {}
    assert sum(figure.failures + figure.wrong_bytes for figure in figures) == 0
    for system in (raw, memcpy):
        for num_clients in (1, 4):
            cells = {f[1:5] for f in figures if f.system == system.name and f.num_clients == num_clients}
            assert {("put", 4 * KIB, 1, num_clients), ("get", 64 * KIB, 1, num_clients)} <= cells
    get = next(f for f in figures if f[:5] == ("raw-tcp", "get", 4 * KIB, 1, 4))
    assert get.calls == TINY.rounds * TINY.max_calls * 4
    assert 0 < get.p10_us <= get.p50_us <= get.p99_us
    assert get.cpu_us_per_call > 0
    with pytest.raises(ProcessLookupError):
        os.kill(raw.server_pids[0], 0)


@pytest.mark.slow
def test_wrong_bytes_are_found(tmp_path: Path) -> None:
    figures, failed = run([Variant(CorruptDriver)], tmp_path, TINY._replace(rounds=1))
    assert failed == {}
    got = next(
        f for f in figures if (f.op, f.size_bytes, f.num_keys, f.num_clients) == ("get", 4 * KIB, 1, 1)
    )
    assert got.wrong_bytes == TINY.max_calls
    assert all(figure.wrong_bytes == 0 for figure in figures if figure.op == "put")


@pytest.mark.slow
def test_a_system_whose_client_dies_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    figures, failed = run([Variant(DyingDriver), Memcpy()], tmp_path, TINY._replace(rounds=1))
    assert list(failed) == ["DyingDriver"]
    assert "client process is gone" in failed["DyingDriver"]
    assert any(f.system == "memcpy" and f.num_keys == 32 for f in figures)


def test_a_missing_peer_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    _, failed = run([Redis()], tmp_path)
    assert "apt-get install redis-server" in failed["redis-tcp"]


def test_a_failed_installation_is_not_taken_for_a_complete_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_SUITE_CACHE", str(tmp_path))
    for _ in range(2):
        with pytest.raises(SystemFailed, match="installation failed"):
            peers.package_dir("nothing", str(tmp_path / "no-such-package.whl"))


def test_a_server_that_ends_at_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo cannot bind; exit 4"], tmp_path / "log")
    with pytest.raises(SystemFailed, match=r"(?s)status 4.*cannot bind"):
        process.wait_until(lambda: False, 30, "server")


def test_cpu_seconds_counts_a_process_and_is_zero_for_a_dead_one() -> None:
    before_s = cpu_seconds(os.getpid())
    sum(range(200_000))
    assert cpu_seconds(os.getpid()) > before_s
    assert cpu_seconds(2**22 + 1) == 0.0


def test_cells_of_exists_move_no_bytes() -> None:
    assert Cell("exists", 4 * KIB, 128, 1).call_bytes == 0
