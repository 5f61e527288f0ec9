"""A short one of benchmarks/bad_night.py: store, connections, disk, engine and router in trouble at once."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from badnight.members import Programs
from badnight.night import Plan, bad_night
from badnight.questions import MAX_TOKENS, prompts
from routersoak.client import Ending

from kvcore import metrics

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

# Without those that start an engine anew, which takes longer than all else here.
FAULTS = ("kill", "stop", "cut", "truncate", "stall", "flip", "fill", "rot", "stop engine", "kill router")


def test_no_token_is_wrong_and_nothing_is_left(
    model: str, plain_tokens: Callable[..., list[list[int]]]
) -> None:
    truth = plain_tokens(prompts(), MAX_TOKENS)
    plan = Plan(
        seconds=30.0,
        seed=1,  # odd: prefill and decode by one store, too
        fault_every_s=2.0,
        engine_fault_every_s=10.0,
        faults=FAULTS,
    )
    # Not tmp_path: the path of a Unix socket may have no more than 107 bytes.
    with tempfile.TemporaryDirectory(prefix="night.") as folder:
        outcome = asyncio.run(bad_night(Path(folder), Programs(model), truth, plan, lambda text: None))
    assert outcome.complaints == []
    assert outcome.endings[Ending.ANSWERED.value] > 20
    assert len(outcome.troubles) >= 5
    for counter in (metrics.SAVED_BLOCKS_TOTAL, metrics.LOADED_BLOCKS_TOTAL):
        assert outcome.counted[f"{metrics.CONNECTOR_PREFIX}{counter}"] > 0
