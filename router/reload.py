"""The configuration read again while requests run: all of what it says, or nothing. Pure.

What cannot change without a new process is where the router listens, what its index and its prompts were made
with, and the kind of source engines come from.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from kvcore.errors import ConfigError
from router.config import RouterConfig

_FIXED = (
    "host",
    "port",
    "store_kv_events",
    "store_namespaces",
    "store_token",
    "upstream_idle_timeout_ms",
    "connect_timeout_ms",
    "log_json",
    "index",
    "prompts",
    "discovery",
)


def changes(old: RouterConfig, new: RouterConfig) -> list[str]:
    """Dotted names of what differs."""
    return sorted(_differences("", msgspec.to_builtins(old), msgspec.to_builtins(new)))


def check_change(
    old: RouterConfig, new: RouterConfig, *, reads_prompts: bool, has_index: bool, records: bool
) -> None:
    """ConfigError when a running router cannot become what `new` says; the flags say how it was built."""
    changed = changes(old, new)
    fixed = [name for name in changed if name.partition(".")[0] in _FIXED]
    if fixed:
        raise ConfigError(f"{', '.join(fixed)}: cannot change while the router runs; start it anew")
    if new.reads_prompts and not reads_prompts:
        raise ConfigError("the new policies or admission read prompts: start the router anew with them")
    if new.kv_events and not has_index:
        raise ConfigError("kv_events: the router was started without an index; start it anew")
    steered = [name for name in changed if name.startswith("scheduling.") or name.endswith("policy")]
    if records and steered:
        raise ConfigError(f"{', '.join(steered)}: cannot change in the middle of a record (--record)")


def _differences(prefix: str, old: Any, new: Any) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in old.keys() | new.keys():
            yield from _differences(f"{prefix}{name}.", old.get(name), new.get(name))
    elif old != new:
        yield prefix[:-1]
