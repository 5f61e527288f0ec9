"""A real prefill and a real decode engine inside the guest, on h0, with their store on h1.

These tests run in the engine environment and in a guest of their own, which has more memory: `scripts/test
tests/rdma` does that.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import EngineHost, engine_settings, make_tiny_model, transfer_config
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import CLIENT_HOST
from tests.rdma.plane_rig import store_on_server

START_S = 900.0
"""Two engines import vLLM side by side on the one CPU of the guest."""


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return engine_settings(make_tiny_model())


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with store_on_server(tmp_path_factory.mktemp("store"), pool="64mb") as store:
        yield store


@pytest.fixture(scope="session")
def transfer(store: StoreProcess) -> dict[str, Any]:
    return transfer_config(store, device_name=",".join(CLIENT_HOST.devices))


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineHost, EngineHost]]:
    """Of the prefill and of the decode engine, without engines as yet."""
    folder = tmp_path_factory.mktemp("engines")
    given = (Path(name) for name in os.environ.get("PYTHONPATH", "").split(os.pathsep) if name)
    python_path = [Path(__file__).with_name("start"), *given]
    hosts = [EngineHost(folder / f"{name}.log", python_path) for name in ("prefill", "decode")]
    for host in hosts:
        _tell_memory_nodes(host, folder)
    yield hosts[0], hosts[1]
    for host in hosts:
        host.close()


def _tell_memory_nodes(host: EngineHost, folder: Path) -> None:
    """vLLM reads in /proc which memory it may use. A kernel without cpusets, as the guest's, does not say."""
    status = Path(f"/proc/{host.process.pid}/status")
    completed = folder / f"status-{host.process.pid}"
    completed.write_text(f"{status.read_text()}Mems_allowed_list:\t0\n")
    subprocess.run(["mount", "--bind", completed, status], check=True)
