"""The sentences at the top of the dashboard: one for each thing that can be wrong."""

import msgspec
import pytest

from router.core.view import Role
from router.dashboard.history import Bounds, Figures, Snapshot, between
from router.dashboard.verdict import BAD, GOOD, WATCH, EngineState, verdict

QUIET = between(Snapshot(at=0.0, unix_time_s=0.0), Snapshot(at=60.0, unix_time_s=60.0), Bounds((), ()))
BUSY = msgspec.structs.replace(QUIET, finished=600)


def engine(name: str, state: str = "up", role: Role = Role.MIXED, detail: str = "") -> EngineState:
    return EngineState(f"http://{name}", role, state, detail)


def texts(found: list[EngineState], recent: Figures | None = BUSY, draining: bool = False) -> list[str]:
    return [f"{finding.level}: {finding.text}" for finding in verdict(found, recent, draining=draining)]


def test_when_all_is_well_it_says_so_and_nothing_else() -> None:
    (one,) = texts([engine("a"), engine("b")])
    assert one == f"{GOOD}: All 2 engines are up. Nothing was rejected and nothing failed in the last minute."
    for silent in (None, QUIET):
        (one,) = texts([engine("a")], silent)
        assert one == f"{GOOD}: The only engine is up. No request ended in the last minute."


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], f"{BAD}: There are no engines: every request is refused."),
        ([engine("a", "down", detail="status 500"), engine("b")], f"{BAD}: http://a is down (status 500)."),
        (
            [engine("a", "breaker_open"), engine("b")],
            f"{BAD}: http://a keeps failing and gets no requests for now.",
        ),
        ([engine("a", "unknown"), engine("b")], f"{WATCH}: http://a has not been healthy yet."),
    ],
)
def test_engines_in_trouble_are_named(found: list[EngineState], expected: str) -> None:
    assert texts(found) == [expected]


def test_many_in_the_same_trouble_are_counted() -> None:
    found = texts([engine(name, "down", detail="no connection") for name in "abcde"] + [engine("f")])
    assert found == [f"{BAD}: 5 engines are down: http://a, http://b, http://c and 2 more."]


def test_nobody_can_answer_when_only_prefill_engines_are_up() -> None:
    found = texts([engine("p", role=Role.PREFILL), engine("d", "down", Role.DECODE)])
    assert found[0] == f"{BAD}: No engine can answer: every request is refused."
    assert f"{BAD}: http://d is down." in found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ttft_met_share": 0.5}, f"{WATCH}: 50% of the answers of the last minute met their TTFT SLO."),
        ({"tbt_met_share": 0.25}, f"{WATCH}: 25% of the answers of the last minute met their TBT SLO."),
        ({"rejected": {"kv_room": 1}}, f"{WATCH}: 1 request was rejected in the last minute."),
        (
            {"rejected": {"kv_room": 5, "ttft_slo": 7}},
            f"{WATCH}: 12 requests were rejected in the last minute.",
        ),
        ({"failed": 30}, f"{BAD}: 5% of the requests of the last minute failed."),
    ],
)
def test_traffic_in_trouble_is_told(changes: dict[str, object], expected: str) -> None:
    assert texts([engine("a")], msgspec.structs.replace(BUSY, **changes)) == [expected]


def test_what_is_fine_is_not_told() -> None:
    fine = msgspec.structs.replace(BUSY, ttft_met_share=0.99, tbt_met_share=1.0, failed=6)
    assert texts([engine("a")], fine)[0].startswith(GOOD)


def test_the_worst_comes_first() -> None:
    missed = msgspec.structs.replace(BUSY, ttft_met_share=0.5)
    found = texts([engine("a", "unknown"), engine("b")], missed, draining=True)
    assert [text.partition(":")[0] for text in found] == [BAD, WATCH, WATCH]
