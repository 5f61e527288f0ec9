"""Configuration of the plugin, written as SGLang's users of Mooncake write it: first the extra config, then
the file of SGLANG_HICACHE_MOONCAKE_CONFIG_PATH, then MOONCAKE_* of the environment; key by key.

The only module of the plugin that reads the environment.
"""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from kvcore.client.address import parse_address
from kvcore.client.mooncake.config import MEANINGLESS
from kvcore.client.settings import StoreSettings
from kvcore.config import load_config, read_file
from kvcore.transport.protocol import planes_of
from sglang_hicache_backend.log import get_logger

logger = get_logger(__name__)

CONFIG_PATH_VARIABLE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"


class BackendConfig(StoreSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of the extra config that are ours. Durations accept "30s"."""

    extra_backend_tag: Annotated[
        str, Meta(description="engines with different tags never share: for deployments side by side")
    ] = ""
    lookup_timeout_ms: Annotated[
        float, Meta(gt=0, description="after this the store counts as not having the pages it was asked for")
    ] = 1000
    load_timeout_ms: Annotated[
        float, Meta(gt=0, description="after this pages that have not arrived are misses; for each 128")
    ] = 10_000
    save_timeout_ms: Annotated[
        float, Meta(gt=0, description="after this pages that are not stored are given up; for each 128")
    ] = 30_000


# Mooncake's names for what we call by the vLLM plugin's; those first that win.
_ALIASES = {
    "master_server_address": "store_address",
    "client_server_address": "store_address",
    "tenant_id": "tenant",
    "rdma_devices": "device_name",
}
_VARIABLES = {
    "MOONCAKE_MASTER": "store_address",
    "MOONCAKE_CLIENT": "store_address",
    "MOONCAKE_DEVICE": "device_name",
    "MOONCAKE_TENANT_ID": "tenant",
}
# Read by SGLang itself and left in the extra config, or by both.
SGLANG_KEYS = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "allocator",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
# Of SGLang's own Mooncake backend; nothing that a client of our store would have to be told.
MOONCAKE_KEYS = MEANINGLESS | {
    "local_hostname",
    "master_metrics_port",
    "check_server",
    "standalone_storage",
    "enable_group_semantics",
}


def backend_config(
    extra_config: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None
) -> BackendConfig:
    """Raises kvcore.errors.ConfigError naming the key and what is wrong with its value, or the file that
    cannot be read. An unknown key is none of our business to refuse: it is logged, with the nearest known."""
    environ = os.environ if environ is None else environ
    fields = BackendConfig.__struct_fields__
    values: dict[str, Any] = {}
    _take(values, extra_config or {}, "extra config")
    if path := environ.get(CONFIG_PATH_VARIABLE):
        _take(values, read_file(Path(path)), path)
    variables = {f"MOONCAKE_{name.upper()}": name for name in fields} | _VARIABLES
    for variable, name in variables.items():
        if environ.get(variable):
            values.setdefault(name, environ[variable])
    config = load_config(BackendConfig, overrides=values)
    parse_address(config.store_address)
    planes_of(config.protocol, config.planes)
    return config


def _take(values: dict[str, Any], source: Mapping[str, Any], origin: str) -> None:
    """What is not there yet. Within one source our own name for a thing goes before Mooncake's."""
    known = (*BackendConfig.__struct_fields__, *_ALIASES)
    found: dict[str, Any] = {}
    for key in known:
        if (value := source.get(key)) not in (None, ""):
            name = _ALIASES.get(key, key)
            if name == "device_name" and isinstance(value, Mapping):
                # SGLang's users write the devices of ranks as JSON in a string; an object means the same.
                value = json.dumps(value)
            found.setdefault(name, value)
    for key in source:
        if key in MOONCAKE_KEYS:
            logger.debug("%s: %s has no meaning to this store", origin, key)
        elif key not in known and key not in SGLANG_KEYS:
            logger.warning("%s: key %r is not known and was ignored%s", origin, key, _nearest(key, known))
    for name, value in found.items():
        values.setdefault(name, value)


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, [*known, *SGLANG_KEYS, *MOONCAKE_KEYS], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
