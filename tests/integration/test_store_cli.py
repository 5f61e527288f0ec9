"""The commands that ask a running store, and what they say when there is none."""

import json
import os
import socket
import subprocess
import sys

import pytest

from store_server.cli import main
from tests.integration.store_harness import StoreProcess
from tests.integration.store_harness import shared_store as shared_store
from tests.integration.store_harness import store as store


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def filled(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> StoreProcess:
    monkeypatch.setenv("MOONCAKE_STORE_ADDRESS", store.ready["address"])
    store.connect().put([key(number) for number in range(5)], [b"x" * 2048] * 5)
    return store


def test_stats(filled: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats"]) == 0
    text = capsys.readouterr().out
    assert "64.0 MiB" in text and "% of the pool is taken" in text
    assert main(["stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objects"] == 5


def test_ls(filled: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--limit", "3"]) == 0
    text = capsys.readouterr().out
    assert key(2).hex() in text and key(3).hex() not in text and "may be more" in text
    assert main(["ls", key(4).hex(), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    info = json.loads(line)
    assert info["key"] == key(4).hex() and info["size_bytes"] == 2048 and info["tier"] == "dram"
    assert info["copies"] == ["dram"]
    assert main(["ls", "not-hex"]) == 2
    assert "hex" in capsys.readouterr().err


def test_evict(filled: StoreProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evict", "1mb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_objects"] == 0, "so much is free already"
    assert main(["evict", "--strategy", "copies"]) == 0
    assert "0 objects evicted" in capsys.readouterr().out
    assert main(["evict", "--strategy", "discard"]) == 0
    assert "5 objects evicted, 10.0 KiB" in capsys.readouterr().out
    assert filled.stats()["objects"] == 0


@pytest.mark.parametrize("plane", ["shm", "tcp"])
def test_bench_measures_and_cleans_up(
    filled: StoreProcess, plane: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--sizes", "4kb,100000", "--seconds", "0.02", "--plane", plane, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["plane"] == plane
    names = [(one["operation"], one["size_bytes"]) for one in result["figures"]]
    sizes = [("put", 4096), ("get", 4096), ("put", 100_000), ("get", 100_000)]
    assert names == [*sizes, ("exists of 128 keys", 0)]
    assert all(0 < one["p50_us"] <= one["p99_us"] for one in result["figures"])
    assert filled.stats()["objects"] == 5
    assert main(["bench", "--sizes", "1kb", "--seconds", "0.01"]) == 0
    assert "GB/s" in capsys.readouterr().out


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    assert main(["stats", "--address", address]) == 1
    error = capsys.readouterr().err
    assert address in error and "Is it running?" in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["evict", "lots"], "not a size"), (["bench", "--sizes", "0"], "greater than nothing")],
)
def test_mistakes(
    filled: StoreProcess, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_who_has_seen_enough_of_the_output_is_told_nothing(filled: StoreProcess) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "store_server.cli", "stats", "--address", str(filled.ready["address"])]
    with os.fdopen(writer, "w") as pipe:
        result = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--port", "99999"], "port"),
        (["--admin-port", "-2"], "admin_port"),
        (["--ready-file", "/dev/null/ready", "--port", "0", "--admin-port", "-1"], "--ready-file"),
    ],
)
def test_mistakes_in_flags_of_serve(flags: list[str], complaint: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "store_server.cli", "serve", "--pool-size-bytes", "16mb", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert complaint in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
