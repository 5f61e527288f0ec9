"""Which engines in Redis count, against time and against a Redis that forgets."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.view import Role
from router.discovery.base import EngineEntry
from router.discovery.registration import FORGET_AFTER_MS, Registration, Roll, encode

NOW_MS = 1_800_000_000_000


def field(url: str, expires_in_ms: int = 10_000, has_left: bool = False) -> dict[bytes, bytes]:
    entry = EngineEntry(url=url, role=Role.DECODE)
    registration = Registration(
        entry=entry, expires_unix_ms=NOW_MS + expires_in_ms, ttl_ms=10_000, has_left=has_left
    )
    return {url.encode(): encode(registration)}


def urls(roll: Roll, now: float) -> list[str]:
    return [entry.url for entry in roll.entries(now)]


def test_an_engine_counts_until_its_time_is_over() -> None:
    roll = Roll()
    assert roll.read(field("http://a:1") | field("http://b:1", -1), NOW_MS, 100.0) == []
    assert urls(roll, 100.0) == ["http://a:1"] == urls(roll, 109.9)
    assert urls(roll, 110.1) == []


def test_a_field_that_vanished_is_no_farewell() -> None:
    roll = Roll()
    roll.read(field("http://a:1"), NOW_MS, 100.0)
    roll.read({}, NOW_MS + 5_000, 105.0)
    assert urls(roll, 105.0) == ["http://a:1"]
    assert urls(roll, 110.1) == []


def test_a_farewell_counts_at_once() -> None:
    roll = Roll()
    roll.read(field("http://a:1"), NOW_MS, 100.0)
    roll.read(field("http://a:1", has_left=True), NOW_MS, 101.0)
    assert urls(roll, 101.0) == []


def test_after_an_outage_everybody_has_time_to_come_back() -> None:
    roll = Roll()
    roll.read(field("http://a:1"), NOW_MS, 100.0)
    roll.read({}, NOW_MS + 60_000, 160.0)
    roll.reached_again(160.0)
    assert urls(roll, 169.0) == ["http://a:1"]
    assert urls(roll, 170.1) == []


def test_what_cannot_be_read_is_counted_and_old_fields_are_given_up() -> None:
    roll = Roll()
    old = field("http://a:1", -FORGET_AFTER_MS - 1)
    assert roll.read({b"x": b"not json"} | old, NOW_MS, 0.0) == [b"http://a:1"]
    assert roll.num_malformed == 1 and urls(roll, 0.0) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30_000), st.sampled_from(["renew", "leave", "wipe"])),
        max_size=30,
    )
)
def test_as_if_every_registration_were_a_lease(steps: list[tuple[int, int, str]]) -> None:
    """Against the naive model: url -> until, an entry at each renewal, none after a farewell."""
    roll, until, fields, now_ms = Roll(), {}, {}, 0
    for number, pause_ms, what in steps:
        now_ms += pause_ms
        url = f"http://h{number}:1"
        if what == "renew":
            fields |= field(url, now_ms + 10_000)
        elif what == "leave":
            fields |= field(url, now_ms + 10_000, has_left=True)
        else:
            fields = {}
        roll.read(fields, NOW_MS + now_ms, now_ms / 1e3)
        if what == "renew":
            until[url] = now_ms + 10_000
        elif what == "leave":
            until.pop(url, None)
        assert urls(roll, now_ms / 1e3) == sorted(one for one, end in until.items() if end > now_ms)
