"""`mooncake-store verify` on what a store left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.store_harness import StartStore
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import SIZE, key, levels, put_all


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


def test_a_path_without_a_store_is_refused(tmp_path: Path) -> None:
    nothing = verify(tmp_path)
    assert nothing.returncode == 2 and "is not an SSD path of a store" in nothing.stderr
    assert list(tmp_path.iterdir()) == []
