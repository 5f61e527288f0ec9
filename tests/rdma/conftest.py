"""For tests that run inside the guest, on its host h0: `scripts/test tests/rdma` brings them there."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.store_process import StoreProcess
from tests.rdma.guest import SERVER_HOST, Faults


@pytest.fixture(autouse=True, scope="session")
def _inside_the_guest() -> None:
    if "RDMA_VM" not in os.environ:
        pytest.exit("these tests need the guest with RDMA devices: run `scripts/test tests/rdma`", 3)


@pytest.fixture
def faults() -> Iterator[Faults]:
    broken = Faults()
    yield broken
    broken.mend()


@pytest.fixture
def start_store(tmp_path: Path) -> Iterator[Callable[..., StoreProcess]]:
    """Starts a mooncake-store on the server's host, with flags of `mooncake-store serve`."""
    stores: list[StoreProcess] = []

    def start(*flags: str, pool: str = "64mb") -> StoreProcess:
        folder = tmp_path / f"store{len(stores)}"
        store = StoreProcess(folder, *flags, pool=pool, host=SERVER_HOST.address, enter=SERVER_HOST.enter)
        stores.append(store)
        return store.start()

    yield start
    for store in stores:
        store.stop()
