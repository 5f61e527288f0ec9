"""The benchmark's engines on a real store: pages arrive, byte for byte; figures are not tested."""

from pathlib import Path

import pytest
import sglang_prefetch
from sglangbench.plan import Shape

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TINY = Shape(name="tiny", layers=2, heads=1, head_dim=16, page_tokens=16, prompt_tokens=128, prompts=2)


def test_it_prefetches_what_another_engine_has_saved(tmp_path: Path) -> None:
    measured = sglang_prefetch.measure(TINY, ["ours"], 2, tmp_path)
    assert (measured.left_out, measured.wrong) == ({}, [])
    assert len(measured.seconds["ours"]) == 2
