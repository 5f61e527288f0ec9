"""The oldest SGLang we run on CPU: it works, and shares its pages with the newest."""

from pathlib import Path

import pytest

from tests.engine.packages import unpacked
from tests.engine.rig import ROOT, StoreProcess
from tests.engine.sglang.conftest import NewServer
from tests.engine.sglang.server import PROMPT, hicache_flags, suite_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]

OLD_SGLANG = "0.5.22"


@pytest.fixture(scope="session")
def old_sglang() -> Path:
    """Unpacked beside the installed one, whose dependencies it shares."""
    return unpacked(f"sglang-{OLD_SGLANG}", f"sglang=={OLD_SGLANG}")


def test_two_versions_share_a_store(
    new_server: NewServer, shared_store: StoreProcess, old_sglang: Path
) -> None:
    flags = hicache_flags("page_first_direct", "direct", suite_config(shared_store, extra_backend_tag="old"))
    old = new_server(*flags, environment={"PYTHONPATH": f"{old_sglang}:{ROOT}"})
    new = new_server(*flags)
    assert old.wait_ready().ask("GET", "/server_info")[1].count(f'"version":"{OLD_SGLANG}"') == 1
    computed = old.generate(PROMPT)
    old.wait_saved()
    old.flush()
    for server in (old, new):
        answer = server.generate(PROMPT)
        assert answer["cached"]["storage"] >= 0.95 * len(PROMPT), answer["cached"]
        assert (answer["tokens"], answer["logprobs"]) == (computed["tokens"], computed["logprobs"])
