"""`mooncake-store top`: how a running store is doing, as a view that keeps itself up to date."""

import json
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.errors import StoreUnavailable
from kvcore.units import format_size

Values = dict[str, float]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened between two samples. Rates are per second, shares from 0 to 1, None where nothing was
    asked."""

    hit_share: float | None
    hit_share_ever: float | None
    read_bytes_per_s: float
    written_bytes_per_s: float
    lookups_per_s: float
    evicted_per_s: float
    promoted_per_s: float
    spilled_per_s: float
    dram_used_bytes: float
    dram_size_bytes: float
    ssd_used_bytes: float
    ssd_size_bytes: float
    objects: float
    ssd_objects: float
    remote_used_bytes: float
    remote_size_bytes: float
    remote_objects: float
    has_remote: bool
    clients: float
    waiting: float
    leases: float
    load: float


def compare(before: Values, after: Values, elapsed_s: float) -> View:
    """The store has restarted between the two when a counter went back: then it is compared with nothing."""
    if after.get(metrics.LOOKUP_KEYS_TOTAL, 0) < before.get(metrics.LOOKUP_KEYS_TOTAL, 0):
        before = {}

    def rate(name: str) -> float:
        return max(0.0, after.get(name, 0) - before.get(name, 0)) / elapsed_s

    def share(of: Values) -> float | None:
        asked = after.get(metrics.LOOKUP_KEYS_TOTAL, 0) - of.get(metrics.LOOKUP_KEYS_TOTAL, 0)
        hits = after.get(metrics.LOOKUP_HITS_TOTAL, 0) - of.get(metrics.LOOKUP_HITS_TOTAL, 0)
        return hits / asked if asked else None

    return View(
        hit_share=share(before),
        hit_share_ever=share({}),
        read_bytes_per_s=rate(metrics.READ_BYTES_TOTAL),
        written_bytes_per_s=rate(metrics.WRITTEN_BYTES_TOTAL),
        lookups_per_s=rate(metrics.LOOKUP_KEYS_TOTAL),
        evicted_per_s=rate(metrics.EVICTED_OBJECTS_TOTAL),
        promoted_per_s=rate(metrics.PROMOTED_OBJECTS_TOTAL),
        spilled_per_s=rate(metrics.SSD_PREFIX + "written_objects_total"),
        dram_used_bytes=after.get(metrics.POOL_USED_BYTES, 0) + after.get(metrics.METADATA_BYTES, 0),
        dram_size_bytes=after.get(metrics.POOL_SIZE_BYTES, 0),
        ssd_used_bytes=after.get(metrics.SSD_PREFIX + "live_bytes", 0),
        ssd_size_bytes=after.get(metrics.SSD_PREFIX + "capacity_bytes", 0),
        objects=after.get(metrics.OBJECTS, 0),
        ssd_objects=after.get(metrics.SSD_PREFIX + "objects", 0),
        remote_used_bytes=after.get(metrics.REMOTE_PREFIX + "live_bytes", 0),
        remote_size_bytes=after.get(metrics.REMOTE_PREFIX + "capacity_bytes", 0),
        remote_objects=after.get(metrics.REMOTE_PREFIX + "objects", 0),
        has_remote=metrics.REMOTE_PREFIX + "objects" in after,
        clients=after.get(metrics.CONNECTIONS, 0),
        waiting=after.get(metrics.WAITERS, 0) + after.get(metrics.WAITING_FOR_ROOM, 0),
        leases=after.get(metrics.LEASES, 0),
        load=after.get(metrics.LOAD, 0),
    )


def run(client: StoreClient, address: str, *, interval_s: float, count: int, as_json: bool) -> None:
    """`count` views (0: until Ctrl-C). StoreUnavailable when the store is not there at the start; one that
    goes away later is waited for."""
    views = _views(client, interval_s, count)
    console = Console()
    try:
        if as_json:
            for view in views:
                print(json.dumps(msgspec.to_builtins(view)) if view else "{}", flush=True)
        elif console.is_terminal:
            with Live(console=console, auto_refresh=False, screen=not count) as live:
                for view in views:
                    live.update(render(address, view), refresh=True)
        else:
            for view in views:
                console.print(render(address, view))
    except KeyboardInterrupt:
        if not as_json:
            print(file=sys.stderr)


def _views(client: StoreClient, interval_s: float, count: int) -> Iterator[View | None]:
    """None while there is no store."""
    before, seen_at = client.stats(), time.monotonic()
    if not before:
        raise StoreUnavailable("the store went away while it was asked")
    number = 0
    while not count or number < count:
        number += 1
        time.sleep(interval_s)
        after, now = client.stats(), time.monotonic()
        yield compare(before, after, now - seen_at) if after else None
        if after:
            before, seen_at = after, now


def render(address: str, view: View | None) -> RenderableType:
    if view is None:
        return Text(f"no store answers on {address}; looking for it ...", style="red")
    tiers = Table.grid(padding=(0, 2))
    _tier(tiers, "DRAM", view.dram_used_bytes, view.dram_size_bytes, view.objects)
    if view.ssd_size_bytes:
        _tier(tiers, "SSD", view.ssd_used_bytes, view.ssd_size_bytes, view.ssd_objects)
    if view.has_remote:
        _tier(tiers, "remote", view.remote_used_bytes, view.remote_size_bytes, view.remote_objects)
    numbers = Table.grid(padding=(0, 3))
    per_second: Callable[[float], str] = lambda value: f"{value:,.0f}/s"  # noqa: E731
    for row in (
        ("hit rate", _percent(view.hit_share), "since the start", _percent(view.hit_share_ever)),
        ("read", _bytes_per_s(view.read_bytes_per_s), "keys looked up", per_second(view.lookups_per_s)),
        ("written", _bytes_per_s(view.written_bytes_per_s), "evicted", per_second(view.evicted_per_s)),
        ("to SSD", per_second(view.spilled_per_s), "back to DRAM", per_second(view.promoted_per_s)),
        ("clients", f"{view.clients:,.0f}", "waiting requests", f"{view.waiting:,.0f}"),
        ("leases", f"{view.leases:,.0f}", "load", _percent(view.load)),
    ):
        numbers.add_row(Text(row[0], style="dim"), row[1], Text(row[2], style="dim"), row[3])
    return Group(Text(f"mooncake-store {address}", style="bold"), "", tiers, "", numbers)


def _tier(table: Table, name: str, used_bytes: float, size_bytes: float, objects: float) -> None:
    table.add_row(
        Text(name, style="bold"),
        ProgressBar(total=size_bytes, completed=used_bytes, width=40) if size_bytes else "no limit",
        f"{format_size(used_bytes)} of {format_size(size_bytes)}" if size_bytes else format_size(used_bytes),
        f"{objects:,.0f} objects",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _bytes_per_s(value: float) -> str:
    return f"{format_size(value)}/s"
