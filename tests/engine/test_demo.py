"""The first command of the README, from end to end with the small model of random weights."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]


def processes_with(environment_entry: str) -> set[int]:
    """Ids of processes with that entry in their environment: what the demo started, whoever the parent is."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if environment_entry.encode() in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Unix sockets lie in it, and their paths may have 107 characters; tmp_path is too long for that."""
    with tempfile.TemporaryDirectory(prefix="demo-") as folder:
        yield Path(folder)


def test_demo_gives_the_same_tokens_overlaps_layers_and_ends_everything(short_tmp: Path) -> None:
    mark = f"MOONCAKE_DEMO_TEST={short_tmp}"
    key, _, value = mark.partition("=")
    done = subprocess.run(
        [str(ROOT / "scripts" / "demo"), "--model", "tiny", "--json"],
        env={**os.environ, key: value, "TMPDIR": str(short_tmp)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])

    requests = {request["name"]: request for request in figures["requests"]}
    assert figures["tokens_identical"] is True
    assert all(request["tokens_identical"] for request in requests.values())
    new_to_decode = requests["genesis, new to decode"]
    assert new_to_decode["tokens_from_store"] > 0.9 * new_to_decode["prompt_tokens"]
    assert new_to_decode["bytes_read"] > 0
    assert requests["declaration, cold"]["bytes_written"] > 0

    assert figures["overlap"]["num_overlapping"] > 0
    assert figures["overlap"]["lead_ms"] > 0
    assert figures["overlap"]["layers_read_before_seal"] > 0

    assert processes_with(mark) == set()
    assert list(short_tmp.iterdir()) == [], "the demo left files behind"
