"""What a live router decides over HTTP, the core decides again, one by one, from the record of it."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest

from kvcore.errors import ConfigError
from kvsim.config import SimConfig, TraceSpec
from kvsim.recorded import read_lines, recorded_trace, replay
from kvsim.runs import simulate
from router.app import Router
from router.core.record import Arrival
from router.core.settings import Settings
from router.recorder import Recorder
from tests.integration.router_harness import async_test, running


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("policy", "pools"),
    [
        ("cache_aware", {"mixed": 3}),
        ("least_loaded", {"mixed": 2}),
        ("global_cache_aware", {"prefill": 2, "decode": 2}),
    ],
)
def test_live_decisions_are_the_cores(
    policy: str, pools: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "live.record"

    @async_test
    async def serve() -> None:
        config = {"policy": policy, "scheduling": Settings(seed=5), "index": {"block_size_tokens": 16}}
        async with running(**pools, **config) as setup:
            for number in range(6):
                await asyncio.gather(
                    *(setup.ask("/v1/chat/completions", chat(group * 400 + str(number))) for group in "abcd")
                )

    with Recorder(file) as recorder:
        recording = functools.partial(Router, record=recorder.write)
        monkeypatch.setattr("tests.integration.router_harness.Router", recording)
        serve()
    decided = [(then, Arrival.of(then.request, now, then.at)) for then, now in replay(read_lines(file))]
    assert len(decided) == 24
    assert [now for _, now in decided] == [then for then, _ in decided]
    assert len({then.decode for then, _ in decided}) > 1
    assert len(recorded_trace(read_lines(file), "live").requests) == 24
    simulated = simulate(SimConfig(trace=TraceSpec(path=str(file)))).summary
    assert simulated.served_requests == 24
    # Only a policy that looks at prefixes has the router hash prompts.
    assert (simulated.hit_rate_blocks > 0.5) == (policy != "least_loaded")


def test_a_record_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--record .*: cannot be written"):
        Recorder(tmp_path / "nowhere" / "live.record")
