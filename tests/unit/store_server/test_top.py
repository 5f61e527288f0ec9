"""What `mooncake-store top` makes of two samples."""

import io

from rich.console import Console

from kvcore import metrics
from store_server.core.store import Store, StoreLimits
from store_server.top import compare, render

BEFORE = {
    **Store(StoreLimits(pool_size_bytes=1 << 20)).stats(),
    metrics.CONNECTIONS: 3.0,
    metrics.LOAD: 0.5,
    metrics.LOOKUP_KEYS_TOTAL: 100,
    metrics.LOOKUP_HITS_TOTAL: 50,
    metrics.READ_BYTES_TOTAL: 1000,
}
AFTER = {
    **BEFORE,
    metrics.LOOKUP_KEYS_TOTAL: 140,
    metrics.LOOKUP_HITS_TOTAL: 80,
    metrics.READ_BYTES_TOTAL: 5_001_000,
    metrics.EVICTED_OBJECTS_TOTAL: 20,
    "ssd_live_bytes": 1 << 30,
    "ssd_capacity_bytes": 4 << 30,
    "ssd_objects": 77,
}


def text_of(view: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(view)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_rates_are_of_the_interval_and_shares_of_what_was_asked() -> None:
    view = compare(BEFORE, AFTER, 2.0)
    assert view.hit_share == 30 / 40 and view.hit_share_ever == 80 / 140
    assert view.read_bytes_per_s == 2_500_000 and view.evicted_per_s == 10
    assert (view.ssd_used_bytes, view.ssd_objects, view.clients) == (1 << 30, 77, 3)


def test_nothing_asked_is_not_a_hit_rate_of_zero() -> None:
    assert compare(AFTER, AFTER, 1.0).hit_share is None


def test_a_restarted_store_is_compared_with_nothing() -> None:
    view = compare(AFTER, BEFORE, 1.0)
    assert view.hit_share == 0.5 and view.read_bytes_per_s == 1000


def test_the_view_names_what_is_there() -> None:
    text = text_of(render("127.0.0.1:1", compare(BEFORE, AFTER, 2.0)))
    for part in ("127.0.0.1:1", "75.0 %", "2.4 MiB/s", "1.0 GiB of 4.0 GiB", "77 objects", "10/s"):
        assert part in text
    plain = text_of(render("a", compare(BEFORE, BEFORE, 1.0))).replace("to SSD", "")
    assert "SSD" not in plain and "remote" not in plain
    remote = {"remote_objects": 5, "remote_live_bytes": 1 << 20, "remote_capacity_bytes": 0}
    words = text_of(render("a", compare({}, {**AFTER, **remote}, 1.0))).split()
    assert " ".join(words[words.index("remote") :]).startswith("remote no limit 1.0 MiB 5 objects")
    assert "no store answers on a" in text_of(render("a", None))
