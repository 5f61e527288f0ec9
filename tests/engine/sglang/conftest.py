"""Fixtures of the tests with a real SGLang; `make_model` and `store` come from tests/engine."""

from collections.abc import Callable, Iterator

import pytest

from tests.engine.rig import StoreProcess
from tests.engine.sglang.server import SglangServer

NewServer = Callable[..., SglangServer]


@pytest.fixture(scope="session")
def sglang_model(make_model: Callable[..., str]) -> str:
    return make_model()


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    store = StoreProcess(tmp_path_factory.mktemp("store"))
    yield store
    store.close()


@pytest.fixture
def new_server(tmp_path_factory: pytest.TempPathFactory, sglang_model: str) -> Iterator[NewServer]:
    """Servers that end with the test. They start in the background: make all, then wait for the first."""
    servers: list[SglangServer] = []

    def make(*flags: str, **options: dict[str, str]) -> SglangServer:
        servers.append(SglangServer(tmp_path_factory.mktemp("sglang"), sglang_model, *flags, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()
