"""The commands that ask a running store. Each prints a table, or JSON for scripts."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError, KVError, StoreUnavailable
from kvcore.metrics import (
    LOOKUP_HITS_TOTAL,
    LOOKUP_KEYS_TOTAL,
    METADATA_BYTES,
    POOL_SIZE_BYTES,
    POOL_USED_BYTES,
)
from kvcore.units import format_objects, format_size, parse_size_bytes
from kvcore.wire.messages import EvictStrategy, KeyInfo, PinKind, Tier, VerifyReply

_PAGE = 1000
_POLL_S = 0.2
_PLACES = {Tier.DRAM: "in DRAM", Tier.SSD: "on SSD", Tier.REMOTE: "on the remote"}
R = TypeVar("R")


@contextlib.contextmanager
def connected(
    address: str, token: str, planes: Sequence[str] = ("tcp",), **tls_files: str
) -> Iterator[StoreClient]:
    """A client with a store behind it; `tls_files` are those of StoreClient. StoreUnavailable or
    RequestRefused, which say what to do."""
    # What goes wrong is told once, by us.
    logging.getLogger("kvcore").setLevel(logging.CRITICAL)
    with StoreClient.connect(
        address, token=token, planes=planes, client_name="mooncake-store", **tls_files
    ) as client:
        if not client.connected:
            reason = client.counters()["last_error"]
            raise StoreUnavailable(f"no store answers on {address} ({reason}). Is it running? See --address")
        yield client


def show_stats(client: StoreClient, *, as_json: bool) -> None:
    values = _asked(client)
    if as_json:
        print(json.dumps(values))
        return
    table = Table("what", "value", title="mooncake-store", show_edge=False)
    for name, value in sorted(values.items()):
        table.add_row(name, _readable(name, value))
    Console().print(table)
    committed = values[POOL_USED_BYTES] + values.get(METADATA_BYTES, 0)
    summary = f"{100 * committed / values[POOL_SIZE_BYTES]:.1f} % of the pool is taken"
    if asked := values.get(LOOKUP_KEYS_TOTAL):
        summary += f", {100 * values[LOOKUP_HITS_TOTAL] / asked:.1f} % of the keys looked up were hits"
    print(summary)


def list_objects(client: StoreClient, *, prefix: str, limit: int, as_json: bool) -> None:
    """`prefix`: hex digits that keys begin with. `limit` 0: all."""
    wanted = _hex(prefix)
    num_shown = 0
    table = Table("key", "size", "layers", "copies", "pin", "leases", show_edge=False)
    for info in _objects(client):
        if not info.key.hex().startswith(wanted):
            continue
        if as_json:
            print(json.dumps(_as_dict(info)))
        else:
            table.add_row(
                info.key.hex(),
                format_size(info.size_bytes),
                f"{info.layers_ready}/{info.num_layers}",
                "+".join(Tier(tier).name for tier in info.copies) or "being written",
                PinKind(info.pin).name.lower() if info.pin else "",
                str(info.num_leases or ""),
            )
        num_shown += 1
        if num_shown == limit:
            break
    if not as_json:
        Console(width=None if sys.stdout.isatty() else 140).print(table)
        print(
            f"{format_objects(num_shown)} shown"
            + (", there may be more (--limit)" if num_shown == limit else "")
        )


def evict(client: StoreClient, *, size: str, strategy: str, as_json: bool) -> None:
    """`size`: how much is to be free afterwards, "" for everything that may go. `strategy`: the name of an
    EvictStrategy."""
    _asked(client)
    chosen = EvictStrategy[strategy.upper()]
    num_objects, size_bytes = client.evict(parse_size_bytes(size) if size else 0, chosen)
    if as_json:
        print(json.dumps({"num_objects": num_objects, "size_bytes": size_bytes}))
    else:
        print(f"{format_objects(num_objects)} evicted, {format_size(size_bytes)}")


def drain(client: StoreClient, *, stop: bool, as_json: bool) -> None:
    """Returns when nothing is left to save. KVError when something could not be saved."""
    reply = _answered(client.drain(stop=stop))
    with tqdm(unit="B", unit_scale=True, desc="saving", total=reply.unsaved_bytes, disable=None) as bar:
        while not reply.is_done:
            bar.total = max(bar.total, reply.unsaved_bytes)
            bar.update(bar.total - reply.unsaved_bytes - bar.n)
            time.sleep(_POLL_S)
            answer = client.drain(stop=stop)
            if answer is None and stop:
                break  # it has ended, which it does only when it is done
            reply = _answered(answer)
    if as_json:
        print(json.dumps({"not_saved": reply.num_refused}))
    else:
        left = f", {format_objects(reply.num_refused)} in DRAM only" if reply.num_refused else ""
        print(f"drained{left}" + ("" if stop else "; nothing new is taken until the store is started again"))


def verify(client: StoreClient, *, remote_rate: str, as_json: bool) -> None:
    """Returns when everything is checked. `remote_rate`: how much of the remote is read in a second. KVError
    when something was corrupt, or could not be read."""
    reply = _answered(client.verify(start=True, remote_bytes_per_s=parse_size_bytes(remote_rate)))
    with tqdm(unit=" objects", desc="verifying", total=reply.num_objects, disable=None) as bar:
        while reply.is_running:
            bar.total = reply.num_objects
            bar.update(reply.num_done - bar.n)
            time.sleep(_POLL_S)
            reply = _answered(client.verify())
        bar.update(reply.num_done - bar.n)
    tell_checked(reply, as_json=as_json)


def tell_checked(reply: VerifyReply, *, as_json: bool) -> None:
    """Of a check that has ended. KVError when something was corrupt, or could not be read."""
    num_unread = sum(level.num_unread for level in reply.levels)
    if as_json:
        print(json.dumps(_check_as_dict(reply, num_unread)))
    else:
        by_level = ", ".join(f"{level.num_objects} {_PLACES[Tier(level.tier)]}" for level in reply.levels)
        print(
            f"{format_objects(reply.num_done - num_unread)} checked ({by_level}), {reply.num_corrupt} corrupt"
            + (f", {reply.num_unchecked} without checksums" if reply.num_unchecked else "")
        )
    complaints = []
    if reply.num_corrupt:
        complaints.append(f"dropped as corrupt: {format_objects(reply.num_corrupt)}")
    if num_unread:
        complaints.append(f"not read: {format_objects(num_unread)} on the remote")
    if reply.trouble:
        complaints.append(reply.trouble)
    if complaints:
        raise KVError("; ".join(complaints))


def _check_as_dict(reply: VerifyReply, num_unread: int) -> dict[str, Any]:
    levels = {
        Tier(level.tier).name.lower(): {
            name: getattr(level, name) for name in level.__struct_fields__ if name != "tier"
        }
        for level in reply.levels
    }
    return {
        "num_done": reply.num_done,
        "num_corrupt": reply.num_corrupt,
        "num_unread": num_unread,
        "num_unchecked": reply.num_unchecked,
        "trouble": reply.trouble,
        "levels": levels,
    }


def _answered(answer: R | None) -> R:
    if answer is None:
        raise StoreUnavailable("the store went away, or refused (its log says why)")
    return answer


def _asked(client: StoreClient) -> dict[str, float]:
    values = client.stats()
    if not values:
        raise StoreUnavailable("the store went away while it was asked")
    return values


def _objects(client: StoreClient) -> Iterator[KeyInfo]:
    cursor = 0
    while True:
        page, cursor = client.list_keys(cursor, _PAGE)
        yield from page
        if not cursor:
            return


def _hex(prefix: str) -> str:
    digits = prefix.lower()
    if digits.strip("0123456789abcdef"):
        raise ConfigError(f"{prefix!r} is not hexadecimal: keys are shown, and looked for, as hex digits")
    return digits


def _as_dict(info: KeyInfo) -> dict[str, Any]:
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    copies = [Tier(tier).name.lower() for tier in info.copies]
    return {**fields, "key": info.key.hex(), "tier": Tier(info.tier).name.lower(), "copies": copies}


def _readable(name: str, value: float) -> str:
    exact = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
    return f"{exact} ({format_size(value)})" if "bytes" in name and value >= 1024 else exact
