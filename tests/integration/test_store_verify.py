"""`mooncake-store verify` on what a store left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcore.wire.messages import Evict
from tests.integration import test_store_remote as remote
from tests.integration.store_harness import StartStore, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import SIZE, key, levels, put_all
from tests.remotes import S3_OPTIONS, make_bucket, s3_server, valkey_server


def verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "store_server.cli", "verify", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_every_checksum_is_checked_and_what_is_corrupt_is_dropped(
    start_store: StartStore, short_dir: Path
) -> None:
    paths = [short_dir / "a", short_dir / "b"]
    store = start_store(*levels(*paths), pool_size="16mb")
    put_all(store.connect(), range(100))
    in_use = verify(*paths)
    assert in_use.returncode == 2 and "in use by another store" in in_use.stderr
    assert store.stop() == 0

    sound = verify(*paths)
    assert (sound.returncode, sound.stdout) == (0, "100 objects checked, 0 corrupt\n"), sound.stderr

    segment = max(paths[0].glob("*.kv"), key=lambda path: path.stat().st_size)
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, bytes(SIZE), 40 * 4096)
    os.close(fd)
    damaged = verify("--json", *paths)
    result = json.loads(damaged.stdout)
    assert damaged.returncode == 1 and "dropped as corrupt" in damaged.stderr
    assert result["objects"] == 100 and 1 <= len(result["corrupt"]) <= 2
    assert set(result["corrupt"]) <= {key(number).hex() for number in range(100)}

    after = verify(*paths)
    assert after.stdout == f"{100 - len(result['corrupt'])} objects checked, 0 corrupt\n"


def verify_config(folder: Path, flags: list[str], *more: str) -> tuple[int, dict[str, dict[str, int]], str]:
    """Of a store that was started with `flags`: exit status, what is told of each level, complaints."""
    config = folder / "store.json"
    config.write_text(json.dumps({"storage_levels": json.loads(flags[1])}))
    done = verify("--json", "--config", config, *more)
    return done.returncode, json.loads(done.stdout)["levels"] if done.stdout else {}, done.stderr


@pytest.mark.slow
def test_with_its_configuration_ssd_and_remote_are_checked(start_store: StartStore, short_dir: Path) -> None:
    flags = remote.levels(f"file://{short_dir}/remote", ssd=short_dir / "ssd")
    store = start_store(*flags, pool_size="16mb")
    client = store.connect()
    put_all(client, range(20))
    client.ask(Evict)
    eventually(lambda: store.stats()["remote_objects"] == 20)
    status, _, complaint = verify_config(short_dir, flags)
    assert status == 2 and "in use by another store" in complaint
    assert store.stop() == 0

    status, found, complaint = verify_config(short_dir, flags)
    assert status == 0, complaint
    assert {name: level["num_done"] for name, level in found.items()} == {"ssd": 20, "remote": 20}

    files = sorted(path for path in (short_dir / "remote").rglob("*") if path.is_file())
    data = bytearray(files[3].read_bytes())
    data[-100] ^= 1
    files[3].write_bytes(data)
    status, found, _ = verify_config(short_dir, flags, "--remote-rate", "0")
    assert status == 0 and list(found) == ["ssd"]
    status, found, complaint = verify_config(short_dir, flags)
    assert status == 1 and "dropped as corrupt: 1 object" in complaint
    assert found["remote"]["num_corrupt"] == 1 and found["ssd"]["num_corrupt"] == 0
    assert not files[3].exists()
    status, found, _ = verify_config(short_dir, flags)
    assert status == 0 and found["remote"]["num_done"] == 19


@pytest.mark.slow
def test_what_was_left_on_s3_is_checked(start_store: StartStore, short_dir: Path) -> None:
    with s3_server(short_dir) as endpoint:
        make_bucket(endpoint, "blocks")
        options = {**S3_OPTIONS, "endpoint": endpoint}
        flags = remote.levels("s3://blocks/kv", options=options, timeout="60s")
        store = start_store(*flags, pool_size="16mb")
        put_all(store.connect(), range(10))
        assert store.stop() == 0
        status, found, complaint = verify_config(short_dir, flags)
        assert (status, found["remote"]["num_done"]) == (0, 10), complaint


@pytest.mark.slow
def test_a_remote_that_is_down_is_said_to_be(start_store: StartStore, short_dir: Path) -> None:
    with valkey_server(short_dir) as valkey:
        flags = remote.levels(valkey.url, timeout="60s")
        store = start_store(*flags, pool_size="16mb")
        put_all(store.connect(), range(10))
        assert store.stop() == 0
        status, found, complaint = verify_config(short_dir, flags)
        assert (status, found["remote"]["num_done"]) == (0, 10), complaint
        valkey.kill()
        status, found, complaint = verify_config(short_dir, flags)
        assert status == 1 and "the remote is down" in complaint and found == {}


def test_nothing_to_check_is_a_mistake(tmp_path: Path) -> None:
    status, _, complaint = verify_config(tmp_path, ["", "[]"])
    assert status == 2 and "has neither ssd nor remote" in complaint
    status, _, complaint = verify_config(tmp_path, ["", "[]"], str(tmp_path))
    assert status == 2 and "do not go together" in complaint


def test_the_address_of_a_running_store_is_no_setting_of_the_stopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_STORE_ADDRESS", "elsewhere:50051")
    _, _, complaint = verify_config(tmp_path, ["", "[]"])
    assert complaint.splitlines() == [line for line in complaint.splitlines() if "neither ssd nor" in line]


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    nothing = verify(tmp_path)
    assert nothing.returncode == 2 and "is not an SSD path of a store" in nothing.stderr
    assert list(tmp_path.iterdir()) == []
