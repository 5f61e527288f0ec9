"""Settings of the engine, also by the names that Mooncake's users have in their environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvcore.errors import ConfigError
from kvcore.transport.slices import RetryPolicy
from kvcore.transport.topology import Matrix, parse_matrix
from kvcore.transport.verbs import PathOptions


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`protocol` auto: RDMA, and TCP where there is no device or no card gets through; rdma and tcp: that
    alone.

    `device_name`: cards to use, separated by commas; empty: all that are active. `matrix_file`: a NIC matrix
    as in topology.py, instead of the one found in sysfs. `slice_bytes`: what one card moves at a time.
    `max_endpoints`: of connections that we make, over all cards. `max_requests`: under way on one of them.
    `token`: peers must send it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""
    protocol: Literal["auto", "rdma", "tcp"] = "auto"
    device_name: str = ""
    matrix_file: str = ""
    slice_bytes: int = 256 << 10
    max_endpoints: int = 256
    max_requests: int = 64
    timeout_ms: int = 30_000
    handshake_timeout_ms: int = 5_000
    retry: RetryPolicy = RetryPolicy()
    path: PathOptions = PathOptions()

    def check(self) -> None:
        """ConfigError for what the types alone cannot rule out."""
        for name in ("slice_bytes", "max_endpoints", "timeout_ms", "handshake_timeout_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_requests < 4:
            raise ConfigError(f"max_requests must be at least 4, not {self.max_requests}")

    def matrix(self) -> Matrix | None:
        """That of `matrix_file`. ConfigError when it cannot be read."""
        if not self.matrix_file:
            return None
        try:
            return parse_matrix(Path(self.matrix_file).read_text(), self.matrix_file)
        except OSError as error:
            raise ConfigError(f"{self.matrix_file}: cannot be read: {error.strerror}") from error


# Names of Mooncake 0.3's transfer engine and store that mean the same here.
_VARIABLES = {
    "MOONCAKE_LOCAL_HOSTNAME": "host",
    "MOONCAKE_PROTOCOL": "protocol",
    "MOONCAKE_DEVICE": "device_name",
    "MC_CUSTOM_TOPO_JSON": "matrix_file",
    "MC_SLICE_SIZE": "slice_bytes",
    "MC_MAX_EP_PER_CTX": "max_endpoints",
    "MC_MAX_WR": "max_requests",
    "MC_RETRY_CNT": "max_attempts",
    "MC_IB_TC": "traffic_class",
}
_NESTED = {"max_attempts": "retry", "traffic_class": "path"}


def engine_config(environ: Mapping[str, str] | None = None, **given: Any) -> EngineConfig:
    """The settings of Mooncake's environment variables; `given` ones come first. ConfigError names the
    variable at fault."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for variable, name in _VARIABLES.items():
        text = environ.get(variable, "")
        if not text:
            continue
        if name in _NESTED:
            outer = _NESTED[name]
            base = RetryPolicy()._asdict() if outer == "retry" else {}
            values[outer] = {**base, name: _whole(variable, text)}
        else:
            values[name] = (
                _whole(variable, text) if name.endswith(("_bytes", "endpoints", "requests")) else text
            )
    if isinstance(values.get("retry"), dict):
        values["retry"] = RetryPolicy(**values["retry"])
    values.update(given)
    try:
        config = msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"transfer engine: {error}") from error
    config.check()
    return config


def _whole(variable: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"environment variable {variable}: a whole number is expected, not {text!r}")
    return int(text)
