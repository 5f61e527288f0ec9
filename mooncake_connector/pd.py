"""The part of `kv_transfer_params` that is ours: which leg of a prefill/decode pair a request is.

    {"mooncake_pd": {"role": "prefill" | "decode", "transfer_id": "...", "wait_ms": 30000}}

The router sends both legs at once; the decode engine follows the prefill engine's layers through the store.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

PARAMS_KEY = "mooncake_pd"


class PDParams(msgspec.Struct, frozen=True):
    """`wait_ms`: how long the decode leg may follow, at most the engine's pd_wait_ms; 0 means just that."""

    role: Literal["prefill", "decode"]
    transfer_id: str = ""
    wait_ms: float = 0


def parse_pd_params(kv_transfer_params: Mapping[str, Any] | None) -> tuple[PDParams | None, str]:
    """(parameters, ""); (None, "") for a request that is not ours; (None, what is wrong) for a malformed one.

    Never raises: a client's mistake must not stop an engine step; such a request is served like any other.
    """
    raw = (kv_transfer_params or {}).get(PARAMS_KEY)
    if raw is None:
        return None, ""
    try:
        return msgspec.convert(raw, PDParams), ""
    except msgspec.ValidationError as error:
        return None, f"kv_transfer_params.{PARAMS_KEY}: {error}"
