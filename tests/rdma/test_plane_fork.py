"""A forked child leaves its parent's queue pairs and registrations alone, also when it ends."""

from pathlib import Path

import pytest

from tests.rdma.guest import CLIENT_HOST, python_on
from tests.rdma.plane_rig import CLIENT_DEVICES, store_on_server

pytestmark = pytest.mark.rdma


def test_a_child_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    program = Path(__file__).with_name("forking_client.py")
    with (
        store_on_server(tmp_path, pool="32mb") as store,
        python_on(CLIENT_HOST, program, store.address, CLIENT_DEVICES) as client,
    ):
        assert client.stdout is not None
        said = client.stdout.read()
        assert (said, client.wait(60)) == ("OK\n", 0)
