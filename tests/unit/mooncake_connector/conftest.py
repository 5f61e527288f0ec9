"""Tests of loads and saves run over every kind of memory that a KV cache may lie in."""

from collections.abc import Iterator

import pytest

from tests.unit.mooncake_connector.rig import Engine


@pytest.fixture(scope="module", params=["host", "device, 4 blocks a ring", "device, 20 blocks a ring"])
def memory_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """The second has rings so small that loads take turns."""
    kind = str(request.param)
    Engine.ring_blocks = 0 if kind == "host" else int(kind.split()[1])
    yield
    Engine.ring_blocks = 0
