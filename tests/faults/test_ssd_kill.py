"""kill -9 at random moments: what was committed reads back right, what was removed stays away."""

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.ssd_writer_process import size_of
from tests.unit.store_server.ssd.harness import Driver, key_of, make_data

ROUNDS = 6
DEADLINE_S = 60.0


def test_committed_objects_survive_kills_at_random_moments(tmp_path: Path) -> None:
    source = random.Random(20260701)
    committed: set[int] = set()
    removed: set[int] = set()
    for round_number in range(ROUNDS):
        first = round_number * 1_000_000
        lines = write_until_killed(tmp_path, first, min_reports=source.randrange(1, 120), source=source)
        committed |= {int(line[1:]) for line in lines if line.startswith("+")}
        removed |= {int(line[1:]) for line in lines if line.startswith("-")}
        check(tmp_path, committed - removed, removed)


def write_until_killed(directory: Path, first: int, min_reports: int, source: random.Random) -> list[str]:
    """Lines the process reported before it was killed, at least `min_reports` objects into its work."""
    command = [sys.executable, "-m", "tests.faults.ssd_writer_process", str(directory), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        lines = [process.stdout.readline() for _ in range(min_reports)]
        assert all(lines), "the writer ended by itself"
        time.sleep(source.random() * 0.05)
    finally:
        process.kill()
        rest = process.communicate(timeout=DEADLINE_S)[0]
    return [line.strip() for line in [*lines, *rest.splitlines(keepends=True)] if line.endswith("\n")]


def check(directory: Path, live: set[int], removed: set[int]) -> None:
    with Driver(directory, capacity_bytes=4 << 30, segment_bytes=4 << 20) as driver:
        there = {int.from_bytes(key[:4], "big") for key in driver.tier}
        # Only multiples of 5 are ever removed, and a removal asked for just before the kill may have come
        # through.
        lost = {number for number in live - there if number % 5}
        assert not lost, f"lost: {sorted(lost)[:10]}"
        assert not there & removed
        for number in there:
            assert driver.get(key_of(number)) == make_data(number, size_of(number))
        checked, corrupt = driver.tier.verify()
        assert (checked, corrupt) == (len(there), [])
