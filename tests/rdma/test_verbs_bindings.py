"""Both verbs bindings over real devices (soft-RoCE)."""

import pytest

from kvcore.transport.verbs import Binding, load_binding
from tests.contracts.verbs_contract import VerbsContract

pytestmark = pytest.mark.rdma


class TestIbverbs(VerbsContract):
    @pytest.fixture
    def binding(self) -> Binding:
        return load_binding("ibverbs")

    @pytest.fixture
    def device_names(self) -> tuple[str, str]:
        return "rxe0", "rxe1"


class TestPyverbs(TestIbverbs):
    @pytest.fixture
    def binding(self) -> Binding:
        return load_binding("pyverbs")
