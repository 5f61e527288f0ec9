"""Configuration of the connector: `kv_connector_extra_config`, then MOONCAKE_<FIELD> of the environment.

The only module of the plugin that reads the environment.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from kvcore.client.settings import StoreSettings
from kvcore.config import load_config
from kvcore.transport.protocol import planes_of


class ConnectorConfig(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`. Sizes accept "256mb", durations "30s"."""

    load_mode: Annotated[
        Literal["async", "sync"],
        Meta(
            description="async loads between steps while other requests run; sync loads layers as they run "
            "(one rank, no asynchronous scheduling; else async)"
        ),
    ] = "async"
    load_threads: Annotated[int, Meta(ge=1, description="requests that may load at the same time")] = 32
    load_batch_blocks: Annotated[int, Meta(ge=1, description="blocks asked of the store in one message")] = 32
    load_timeout_ms: Annotated[
        float, Meta(gt=0, description="after this a load has failed and its blocks are recomputed")
    ] = 10_000
    lookup_timeout_ms: Annotated[
        float, Meta(gt=0, description="after this the store counts as not having a request's prefix")
    ] = 50
    lookup_wait_ms: Annotated[
        float, Meta(ge=0, description="how long one engine step may wait for lookups; they go on behind it")
    ] = 3
    pd_wait_ms: Annotated[
        float,
        Meta(
            gt=0, description="how long a decode engine follows its prefill engine, unless the request says"
        ),
    ] = 30_000

    save_decode_blocks: Annotated[bool, Meta(description="also save blocks of generated tokens")] = True
    staging_size_bytes: Annotated[
        int,
        Meta(
            ge=1, description="host memory for layers on their way to the store; full: blocks are not saved"
        ),
    ] = 256 << 20
    load_staging_size_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="pinned host memory for blocks on their way to a device; full: loads take turns",
        ),
    ] = 512 << 20
    staging: Annotated[
        Literal["auto", "always"],
        Meta(
            description="auto: pinned host memory between a KV cache on a device and the store; always: tests"
        ),
    ] = "auto"
    drain_timeout_ms: Annotated[
        float, Meta(ge=0, description="how long a shutdown waits for layers on their way to the store")
    ] = 3_000

    trace_path: Annotated[
        str, Meta(description="append one JSON line per layer saved or loaded to this file; empty: off")
    ] = ""


# Variables that Mooncake's users have, and ours of the same meaning, which go first.
_MOONCAKE_VARIABLES = {
    "MOONCAKE_MASTER": "MOONCAKE_STORE_ADDRESS",
    "MOONCAKE_DEVICE": "MOONCAKE_DEVICE_NAME",
    "MOONCAKE_TENANT_ID": "MOONCAKE_TENANT",
}


def connector_config(
    extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """Raises kvcore.errors.ConfigError naming the key or variable at fault; vLLM then does not start."""
    environ = dict(os.environ if environ is None else environ)
    for variable, ours in _MOONCAKE_VARIABLES.items():
        if environ.get(variable):
            environ.setdefault(ours, environ[variable])
    config = load_config(ConnectorConfig, env_prefix="MOONCAKE", environ=environ, overrides=extra_config)
    planes_of(config.protocol, config.planes)
    return config


def engine_hash_seed(environ: Mapping[str, str] | None = None) -> str | None:
    """PYTHONHASHSEED, from which vLLM derives the root of its block hashes; None when it is not set."""
    return (os.environ if environ is None else environ).get("PYTHONHASHSEED")
