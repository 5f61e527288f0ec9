"""What a soak must show: each way it can fail is a complaint."""

import random

import pytest
from routersoak.client import Ending, draw_request
from routersoak.cluster import Gauges
from routersoak.soak import Outcome

MIB = 1 << 20
QUIET = Gauges(
    active_requests=0, in_flight=0, client_connections=1, rss_bytes=60 * MIB, open_files=40, cpu_s=9.0
)


def outcome(**changes: object) -> Outcome:
    values: dict[str, object] = {
        "router": "mixed",
        "seconds": 1800.0,
        "requests": 10,
        "endings": {Ending.ANSWERED.value: 8, Ending.FAILED.value: 2},
        "rss_bytes": [55 * MIB, 60 * MIB, 61 * MIB],
        "open_files": [40, 40, 40],
        "cpu_share": 0.02,
        "at_the_end": QUIET,
        "engine_troubles": {},
        **changes,
    }
    return Outcome(**values)  # type: ignore[arg-type]


def test_engines_that_fail_are_no_reason_to_complain() -> None:
    assert outcome().complaints() == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"endings": {Ending.ANSWERED.value: 8, Ending.HUNG.value: 1}}, "1 requests hung"),
        ({"endings": {Ending.FAILED.value: 8}}, "nothing was answered"),
        ({"rss_bytes": [50 * MIB, 60 * MIB, 80 * MIB]}, "memory grows: 50 MiB, 60 MiB, 80 MiB"),
        ({"at_the_end": Gauges(1, 2, 1, MIB, 9, 1.0)}, "1 requests and 2 legs are left without clients"),
    ],
)
def test_what_must_not_be_is_told(changes: dict[str, object], complaint: str) -> None:
    assert outcome(**changes).complaints() == [complaint]


def test_a_short_run_says_nothing_of_memory() -> None:
    assert outcome(seconds=60.0, rss_bytes=[MIB, MIB, 80 * MIB]).complaints() == []


def test_traffic_is_of_every_kind_and_repeats_with_its_seed() -> None:
    first, again = ([draw_request(random.Random(seed)) for seed in range(300)] for _ in range(2))
    assert first == again
    assert any(request.leaves_after for request in first) and any(request.headers for request in first)
    assert any(b'"stream": true' in request.body for request in first)
    assert any(b'"stream": false' in request.body for request in first)
    assert {request.method for request in first} == {b"GET", b"POST"}
