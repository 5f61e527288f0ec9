"""What a live router decides over HTTP, the core decides again, one by one, from the record of it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvsim.recorded import read_lines, recorded_trace, replay, write_lines
from router.core.cluster_book import ClusterBook
from router.core.policies.base import Policy
from router.core.prefix_index import PrefixIndex
from router.core.record import Arrival, Header, Line
from router.core.recording import RecordingBook, RecordingIndex, RecordingScheduler
from router.core.settings import Settings
from tests.integration.router_harness import async_test, running

BLOCK_SIZE_TOKENS = 16


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


@pytest.mark.parametrize(("policy", "pools"), [("cache_aware", {"mixed": 3}), ("least_loaded", {"mixed": 2})])
def test_live_decisions_are_the_cores(
    policy: str, pools: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Line] = []
    settings = Settings(seed=5)

    def new_index(block_size_tokens: int, *limits: Any) -> PrefixIndex:
        return RecordingIndex(block_size_tokens, lines.append)

    def new_book(settings: Settings, index: PrefixIndex | None) -> ClusterBook:
        lines.append(Header(settings, policy, policy, index.block_size_tokens if index else 0))
        return RecordingBook(settings, index, lines.append)

    def new_scheduler(prefill: Policy, decode: Policy, settings: Settings) -> RecordingScheduler:
        return RecordingScheduler(prefill, decode, settings, lines.append)

    monkeypatch.setattr("router.app.PrefixIndex", new_index)
    monkeypatch.setattr("router.app.ClusterBook", new_book)
    monkeypatch.setattr("router.app.Scheduler", new_scheduler)

    @async_test
    async def serve() -> None:
        config = {"policy": policy, "scheduling": settings, "index": {"block_size_tokens": BLOCK_SIZE_TOKENS}}
        async with running(**pools, **config) as setup:
            for number in range(6):
                await asyncio.gather(
                    *(setup.ask("/v1/chat/completions", chat(group * 400 + str(number))) for group in "abcd")
                )

    serve()
    file = tmp_path / "live.record"
    write_lines(file, lines)
    decided = [(then, Arrival.of(then.request, now, then.at)) for then, now in replay(read_lines(file))]
    assert len(decided) == 24
    assert [now for _, now in decided] == [then for then, _ in decided]
    assert len({then.decode for then, _ in decided}) == len(pools) + pools["mixed"] - 1
    assert len(recorded_trace(read_lines(file), "live").requests) == 24
