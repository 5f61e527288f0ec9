import json
from itertools import chain

import pytest
from rich.console import Console
from storebench.plan import MIB, QUICK, Cell
from storebench.report import as_json, print_tables
from storebench.stats import PhaseResult, summarise
from storebench.systems.memcpy import Memcpy
from storebench.targets import TARGETS, Target, judge

GET = Cell("get", MIB, 1, 1)
TARGET = Target("ours-tcp", "get", (MIB,), 1, 1, "peer", 1.5)


def figure(system: str, latency_us: int, cell: Cell = GET, failures: int = 0, wrong_bytes: int = 0):
    return summarise(system, cell, [PhaseResult((latency_us * 1000,), 1.0, 0.1, failures, wrong_bytes)])


@pytest.mark.parametrize(("peer_us", "met"), [(149, False), (150, True), (400, True)])
def test_a_target_is_met_from_its_ratio_on(peer_us: int, met: bool) -> None:
    (verdict,) = judge([figure("ours-tcp", 100), figure("peer", peer_us)], [TARGET])
    assert verdict.met is met
    assert verdict.ratio == pytest.approx(peer_us / 100)


def test_what_was_not_measured_has_no_verdict() -> None:
    assert list(judge([figure("ours-tcp", 100)], [TARGET])) == []
    assert (
        list(judge([figure("ours-tcp", 100), figure("peer", 1, GET._replace(size_bytes=4096))], [TARGET]))
        == []
    )


def test_targets_name_systems_that_exist() -> None:
    from storebench.systems import BASELINES, OURS, PEERS

    made = {make().name for make in (*OURS, *BASELINES, *chain.from_iterable(PEERS.values()))}
    assert {target.ours for target in TARGETS} | {target.peer for target in TARGETS} <= made


def test_the_table_shows_misses_failures_and_wrong_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    figures = [figure("ours-tcp", 100, failures=1, wrong_bytes=77), figure("peer", 120)]
    print_tables(Console(width=160), figures, list(judge(figures, [TARGET])))
    shown = capsys.readouterr().out
    assert "1 of 1 failed" in shown
    assert "77 wrong bytes" in shown
    assert "missed" in shown


def test_json_holds_every_figure_and_names_what_was_left_out() -> None:
    figures = [figure("ours-tcp", 100), figure("peer", 200)]
    document = json.loads(
        json.dumps(
            as_json(
                figures, list(judge(figures, [TARGET])), [Memcpy()], {"redis-tcp": "no server"}, QUICK, 0.5
            )
        )
    )
    assert [f["system"] for f in document["figures"]] == ["ours-tcp", "peer"]
    assert document["targets"][0]["met"] is True
    assert document["left_out"] == {"redis-tcp": "no server"}
