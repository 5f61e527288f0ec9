"""drain, verify and top against real stores."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Exists, Lookup, Reserve, Status, Tier, Write
from store_server.cli import main
from tests.integration.store_harness import DEADLINE_S, StartStore, StoreProcess, eventually
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_store_ssd import OK, POOL, check_all, key, levels, lookup, put_all, value

Capture = pytest.CaptureFixture[str]


def ask(store: StoreProcess, *arguments: str) -> int:
    command, *rest = arguments
    return main([command, "--address", store.ready["address"], *rest])


def state(store: StoreProcess) -> str:
    try:
        return str(json.loads(store.http("/ready"))["status"])
    except urllib.error.HTTPError as error:
        with error:
            return str(json.loads(error.read())["status"])


def test_a_drained_store_has_lost_nothing(start_store: StartStore, short_dir: Path, capsys: Capture) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size="32mb")
    client = store.connect()
    put_all(client, range(40))
    assert state(store) == "ready"
    assert ask(store, "drain", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"not_saved": 0}
    assert state(store) == "draining"
    assert client.put([key(99)], [b"x"]) == [Status.FULL], "nothing new is taken"
    assert client.put([key(1)], [value(1)]) == [Status.EXISTS]
    check_all(client, range(40))
    assert store.stats()["ssd_written_objects_total"] == 40
    assert ask(store, "drain", "--stop") == 0
    assert "drained" in capsys.readouterr().out
    assert store.process.wait(DEADLINE_S) == 0
    again = start_store(*levels(short_dir / "ssd"), pool_size="32mb")
    reply = lookup(again.connect(), range(40))
    assert reply.num_hits == 40 and set(reply.tiers) == {Tier.SSD}


def test_a_drain_waits_for_writers_that_have_begun(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    client = store.connect()
    client.ask(Reserve, keys=[key(1)], sizes_bytes=[2048], num_layers=2)
    with StoreClient.connect(store.ready["address"], planes=("tcp",)) as operator:
        reply = operator.drain()
        assert reply is not None and not reply.is_done and reply.num_pending == 1
        for layer in (0, 1):
            assert client.statuses(
                Write, [key(1)], payload=bytes(1024), layer_begin=layer, layer_end=layer + 1
            ) == [OK]
        eventually(lambda: (answer := operator.drain()) and answer.is_done)
    assert store.stats()["ssd_objects"] == 1


def test_without_an_ssd_a_drain_says_what_will_be_lost(start_store: StartStore, capsys: Capture) -> None:
    store = start_store()
    store.connect().put([key(1), key(2)], [b"a", b"b"])
    assert ask(store, "drain") == 0
    assert "2 objects in DRAM only; nothing new" in capsys.readouterr().out
    assert ask(store, "drain", "--stop", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"not_saved": 2}
    assert store.process.wait(DEADLINE_S) == 0


def test_a_store_that_is_stopped_while_it_drains_saves_what_it_can(
    start_store: StartStore, short_dir: Path
) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size="32mb")
    client = store.connect()
    put_all(client, range(60))
    with StoreClient.connect(store.ready["address"], planes=("tcp",)) as operator:
        operator.drain()
    assert store.stop() == 0
    again = start_store(*levels(short_dir / "ssd"), pool_size="32mb")
    check_all(again.connect(), range(60))


def test_verify_checks_dram_and_ssd_and_drops_what_is_corrupt(
    start_store: StartStore, short_dir: Path, capsys: Capture
) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    address = store.ready["address"]
    with StoreClient.connect(address) as client:
        assert client.plane is not None and client.plane.name == "shm"
        for number in range(128):  # with checksums; half of it goes to disk
            assert client.put(key(number), value(number)) is OK
    eventually(lambda: store.stats()["ssd_queued_bytes"] == 0)
    assert ask(store, "verify", "--json") == 0
    sound = json.loads(capsys.readouterr().out)
    assert sound["num_corrupt"] == sound["num_unchecked"] == 0 and sound["num_done"] >= 128

    in_dram: list[int] = []

    def nothing_goes_to_disk_any_more() -> bool:
        """A lookup is a use: it may let others go to disk, and with them the one that is to be spoiled."""
        nonlocal in_dram
        before = in_dram
        tiers = ((n, lookup(store.connect(), range(n, n + 1)).tiers) for n in range(128))
        in_dram = [n for n, tiers_of_it in tiers if tiers_of_it == bytes([Tier.DRAM])]
        return in_dram == before and store.stats()["ssd_queued_bytes"] == 0

    eventually(nothing_goes_to_disk_any_more)
    spoil_dram(store.process.pid, value(in_dram[-1]))
    segments = sorted((short_dir / "ssd").glob("*.kv"), key=lambda path: path.stat().st_size)
    fd = os.open(segments[-1], os.O_RDWR)
    os.pwrite(fd, bytes(4096), 40 * 4096)
    os.close(fd)
    assert ask(store, "verify", "--json") == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_corrupt"] == 2 and "dropped as corrupt: 2 objects" in captured.err
    eventually(lambda: store.stats()["ssd_corrupt_total"] == 1)
    assert store.stats()[metrics.CORRUPT_TOTAL] == 1
    assert ask(store, "verify") == 0
    assert "0 corrupt" in capsys.readouterr().out


def spoil_dram(pid: int, wanted: bytes) -> None:
    """Flips a byte of the object with these bytes in the pool of that process."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            break
    else:
        raise AssertionError("no pool")
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(begin)
        pool = memory.read(end - begin)
        at = pool.index(wanted)
        memory.seek(begin + at + 5)
        memory.write(bytes([wanted[5] ^ 0xFF]))


def test_a_check_of_objects_without_checksums_says_so(start_store: StartStore, capsys: Capture) -> None:
    store = start_store()
    store.connect().put([key(1)], [b"no checksum came with this"])
    assert ask(store, "verify") == 0
    assert "1 object checked (1 in DRAM), 0 corrupt, 1 without checksums" in capsys.readouterr().out


def test_a_store_can_be_stopped_in_the_middle_of_a_check(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(*levels(short_dir / "ssd"), pool_size=POOL)
    put_all(store.connect(), range(100))
    with StoreClient.connect(store.ready["address"], planes=("tcp",)) as operator:
        reply = operator.verify(start=True)
        assert reply is not None and reply.is_running
    assert store.stop() == 0


@pytest.mark.slow
def test_top_shows_what_happens(start_store: StartStore, capsys: Capture) -> None:
    store = start_store()
    client = store.connect()
    client.put([key(1)], [bytes(100_000)])
    client.ask(Lookup, keys=[key(1), key(2)])
    assert ask(store, "top", "--interval", "0.05", "--count", "2", "--json") == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["hit_share_ever"] == 0.5 and second["hit_share"] is None
    assert second["dram_used_bytes"] > 100_000 and second["clients"] == 2
    assert ask(store, "top", "--interval", "0.05", "--count", "1") == 0
    text = capsys.readouterr().out
    assert "hit rate" in text and "DRAM" in text and "64.0 MiB" in text
    assert ask(store, "top", "--interval", "0") == 2


def test_top_waits_for_a_store_that_goes_away(start_store: StartStore) -> None:
    store = start_store()
    command = [sys.executable, "-m", "store_server.cli", "top", "--address", store.ready["address"]]
    command += ["--interval", "0.05", "--count", "100000", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert json.loads(top.stdout.readline())["objects"] == 0
        store.stop()
        assert any(line == "{}\n" for line in top.stdout)
        top.terminate()


def test_readers_see_what_a_drain_keeps(start_store: StartStore) -> None:
    store = start_store()
    client = store.connect()
    client.put([key(1)], [b"x"])
    with StoreClient.connect(store.ready["address"], planes=("tcp",)) as operator:
        operator.drain()
    assert client.statuses(Exists, [key(1), key(2)]) == [OK, Status.MISSING]


def test_systemd_learns_when_the_store_is_ready_and_when_it_ends(
    start_store: StartStore, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short_dir / "notify"))
        systemd.settimeout(DEADLINE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_dir / "notify"))
        store = start_store()
        assert systemd.recv(100) == b"READY=1"
        assert store.stop() == 0
        assert systemd.recv(100) == b"STOPPING=1"
