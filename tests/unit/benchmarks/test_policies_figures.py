"""The policy benchmark's arithmetic, and its client against a server that answers as vLLM does."""

import asyncio
import io
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web
from demo_lib.processes import DemoError
from policiesbench.cells import LAYOUTS, MIXED, PAPER, SHARED, SPLIT
from policiesbench.client import ask_all
from policiesbench.figures import Sample, Turn, mean_ttft_ms, paired, quantile, summed_up, tbt_quantile
from policiesbench.tables import by_cell, layouts_table, policies_table
from policiesbench.workload import Prompt
from rich.console import Console


def turn(round_number: int, ttfts_ms: Sequence[float], cell: tuple[str, str] = (SHARED, MIXED)) -> Turn:
    samples = [Sample(ttft_ms, 1000, [10.0, 30.0]) for ttft_ms in ttfts_ms]
    return summed_up(*cell, round_number, samples, 400.0 * len(samples), 100.0 * len(samples))


def test_a_turn_is_summed_up() -> None:
    one = turn(2, [100.0 * number for number in range(1, 11)])
    assert mean_ttft_ms(one) == pytest.approx(550.0)
    assert quantile(one.ttfts_ms, 0.9) == 1000.0
    assert (one.hit_rate, one.store_rate) == (0.4, 0.1)
    assert len(one.tbts_ms) == 20
    assert tbt_quantile(0.25)(one) == 10.0 and tbt_quantile(0.99)(one) == 30.0


def test_turns_are_compared_with_those_of_the_same_round() -> None:
    slower = [turn(number, [100.0 * number + 50.0]) for number in range(4)]
    faster = [turn(number, [100.0 * number]) for number in (3, 1, 0, 2)]
    difference = paired(slower, faster, mean_ttft_ms, 0)
    # Rounds differ by far more than the cells do, but not within a round.
    assert difference.mean == difference.low == difference.high == 50.0
    assert difference.rounds_above == 4


def test_an_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(7)
    held = 0
    for trial in range(100):
        slower = [turn(number, [rng.gauss(20.0, 40.0)]) for number in range(10)]
        faster = [turn(number, [0.0]) for number in range(10)]
        difference = paired(slower, faster, mean_ttft_ms, trial)
        held += difference.low <= 20.0 <= difference.high
    assert 85 <= held <= 99


def test_one_round_has_no_interval() -> None:
    difference = paired([turn(0, [30.0])], [turn(0, [40.0])], mean_ttft_ms, 0)
    assert (difference.mean, difference.low, difference.high) == (-10.0, -10.0, -10.0)
    assert difference.rounds_above == 0


def test_each_policy_is_compared_with_the_one_before_it() -> None:
    turns = [
        turn(number, [1000.0 - 200.0 * rank + number], cell)
        for rank, cell in enumerate(PAPER)
        for number in range(3)
    ]
    text = shown(policies_table(by_cell(turns), 2.0, 0))
    assert text.count("200 [200, 200]") == 3
    assert text.count("3 of 3") == 3


def test_layouts_are_compared_by_both_latencies() -> None:
    turns = [turn(0, [100.0], LAYOUTS[0]), turn(0, [130.0], LAYOUTS[1])]
    lines = shown(layouts_table(by_cell(turns), 2.0, 0)).splitlines()
    assert any(SPLIT in line and "130" in line for line in lines)
    (compared,) = (line for line in lines if "minus mixed" in line)
    assert "30" in compared


def shown(table: Any) -> str:
    console = Console(width=250, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def events(count: int) -> list[bytes]:
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": "a", "token_ids": [5]}], "usage": None} for _ in range(count)
    ]
    parts.append({"choices": [], "usage": {"prompt_tokens": 7}})
    return [b"data: " + msgspec.json.encode(part) + b"\n\n" for part in parts] + [b"data: [DONE]\n\n"]


async def ask_a_server(parts: list[bytes], max_tokens: int, status: int = 200) -> list[Sample]:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        assert body["prompt"] == "Why?" and body["max_tokens"] == max_tokens and body["stream"]
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return await ask_all(f"http://127.0.0.1:{port}", [Prompt(0.0, "Why?")] * 2, max_tokens, lambda: None)
    finally:
        await runner.cleanup()


def test_the_client_notes_every_token() -> None:
    samples = asyncio.run(ask_a_server(events(3), 3))
    assert len(samples) == 2
    for sample in samples:
        assert sample.ttft_ms > 0 and sample.prompt_tokens == 7
        assert len(sample.tbt_ms) == 2


@pytest.mark.parametrize(
    ("parts", "status", "told"),
    [
        (events(2), 200, "2 tokens of 3"),
        (events(3)[:-1], 200, r"without \[DONE\]"),
        ([b'data: {"error": {"message": "no"}}\n\n'], 200, "ended with an error"),
        ([b"too busy"], 503, "answered 503: b'too busy'"),
        ([b"data: nothing\n\n"], 200, "DecodeError"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(parts: list[bytes], status: int, told: str) -> None:
    with pytest.raises(DemoError, match=told):
        asyncio.run(ask_a_server(parts, 3, status))
