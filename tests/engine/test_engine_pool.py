"""What of a store's pool an engine has in its memory."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import EngineHost, StoreProcess, request, tokens_of, transfer_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_an_engine_maps_the_pool_once(
    host: EngineHost, store: StoreProcess, engine_kwargs: dict[str, Any]
) -> None:
    """Scheduler and worker are in one process here, as everywhere with one rank."""
    assert host.call("start", engine=engine_kwargs, transfer=transfer_config(store))["reason"] == ""
    assert tokens_of(host.call("generate", requests=[request(range(100), 4)]))
    mappings = Path(f"/proc/{host.process.pid}/maps").read_text().splitlines()
    assert sum("mooncake-store-pool" in mapping for mapping in mappings) == 1
