"""Where a store's sockets lie."""

import socket
from pathlib import Path

from store_server.runtime_dir import _MAX_PARENT_BYTES, RuntimeDir


def test_it_is_private_and_goes_with_its_store(tmp_path: Path) -> None:
    runtime = RuntimeDir(Path("/tmp"))
    assert runtime.path.stat().st_mode & 0o777 == 0o700
    runtime.close()
    assert not runtime.path.exists()


def test_what_a_dead_store_left_is_removed_but_not_a_living_ones(tmp_path: Path) -> None:
    parent = tmp_path if len(str(tmp_path)) < 60 else Path("/tmp")
    living = RuntimeDir(parent)
    dead = parent / "mooncake-store-dead"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    other = RuntimeDir(parent)
    assert living.path.exists() and not dead.exists()
    other.close()
    living.close()


def test_a_temporary_directory_too_deep_for_sockets_is_left_for_tmp(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    runtime = RuntimeDir(deep)
    try:
        assert runtime.path.parent == Path("/tmp")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(runtime.path / "store.sock"))
    finally:
        runtime.close()


def test_any_directory_that_is_not_too_deep_has_room_for_sockets(tmp_path: Path) -> None:
    parent = Path("/tmp") / ("m" * (_MAX_PARENT_BYTES - len("/tmp/")))
    parent.mkdir(exist_ok=True)
    runtime = RuntimeDir(parent)
    try:
        assert runtime.path.parent == parent
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(runtime.path / "store.sock"))
    finally:
        runtime.close()
        parent.rmdir()
