"""What `setup` was told, completed by MOONCAKE_CONFIG_PATH and MOONCAKE_* of the environment.

The only module of this API that reads the environment.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcore.client.address import parse_address
from kvcore.config import read_file
from kvcore.errors import ConfigError
from kvcore.transport.protocol import planes_of

logger = logging.getLogger(__name__)

# Names of Mooncake's setup(dict) and of its JSON files that say nothing to a client of our store: it owns no
# segment and needs no metadata server.
MEANINGLESS = frozenset(
    {
        "metadata_server",
        "global_segment_size",
        "local_buffer_size",
        "ipc_socket_path",
        "enable_ssd_offload",
        "ssd_offload_path",
        "enable_client_http_server",
        "client_http_port",
        "transfer_timeout",
    }
)
_MEANINGFUL = (
    "local_hostname",
    "master_server_address",
    "protocol",
    "device_name",
    "tenant_id",
    "store_token",
    "store_tls_ca",
)
_ALIASES = {"master_server_addr": "master_server_address", "rdma_devices": "device_name"}
_ENVIRONMENT = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "master_server_address": "MOONCAKE_MASTER",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "store_token": "MOONCAKE_STORE_TOKEN",
    "store_tls_ca": "MOONCAKE_STORE_TLS_CA",
}


class SetupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`master_server_address` is that of mooncake-store: "host:port", "tls://host:port", "unix:///path".
    `protocol` and `device_name` as in kvcore/transport/protocol.py."""

    master_server_address: str
    local_hostname: str = "localhost"
    protocol: str = "auto"
    device_name: str = ""
    tenant_id: str = "default"
    store_token: str = ""
    store_tls_ca: str = ""


def resolve(given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> SetupConfig:
    """What was given, then the file of MOONCAKE_CONFIG_PATH, then the environment; empty strings count as not
    given. ConfigError says what is missing or unknown."""
    environ = os.environ if environ is None else environ
    values: dict[str, str] = {}
    sources: list[tuple[str, Mapping[str, Any]]] = [("setup()", given)]
    if path := environ.get("MOONCAKE_CONFIG_PATH"):
        sources.append((path, read_file(Path(path))))
    sources.append(
        ("the environment", {name: environ.get(variable, "") for name, variable in _ENVIRONMENT.items()})
    )
    for origin, source in sources:
        for raw_name, value in source.items():
            name = _ALIASES.get(raw_name, raw_name)
            if name in MEANINGLESS:
                logger.debug("%s: %s has no meaning to this store", origin, raw_name)
            elif name not in _MEANINGFUL:
                raise ConfigError(
                    f"{origin}: unknown key {raw_name!r}; those with a meaning are {', '.join(_MEANINGFUL)}"
                )
            elif not isinstance(value, str):
                raise ConfigError(f"{origin}: {raw_name} is a text, not {value!r}")
            elif value:
                values.setdefault(name, value)
    if "master_server_address" not in values:
        raise ConfigError(
            "where is the store? Give master_server_addr to setup(), or set MOONCAKE_MASTER, "
            "to the address of mooncake-store, for example 127.0.0.1:50051"
        )
    parse_address(values["master_server_address"])
    planes_of(values.get("protocol", ""))
    return SetupConfig(**values)
