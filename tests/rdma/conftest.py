"""For tests that run inside the guest, on its host h0: `scripts/test tests/rdma` brings them there."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.transport.verbs import load_binding
from tests.integration.store_process import StoreProcess
from tests.rdma.guest import SERVER_HOST, Faults


@pytest.fixture(autouse=True, scope="session")
def _inside_the_guest() -> None:
    if "RDMA_VM" not in os.environ:
        pytest.exit("these tests need the guest with RDMA devices: run `scripts/test tests/rdma`", 3)


@pytest.fixture(autouse=True, scope="session")
def _numbers_that_differ(_inside_the_guest: None) -> None:
    """Devices number their queue pairs alike. Where both wires carry pairs of the same numbers at once,
    soft-RoCE of Linux 6.1 with all its devices in one namespace stands still until the senders give up; why
    is not known. With different numbers it never did. So some are used up here, of each device another
    count."""
    binding = load_binding()
    for count, name in enumerate(binding.device_names()):
        device = binding.open(name)
        completions = device.completion_queue(16)
        for _ in range(5 * count):
            device.queue_pair(completions, max_requests=1).close()
        completions.close()
        device.close()


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
