"""How a leg's body differs from the client's. Pure.

Values are moved as the bytes they came in (msgspec.Raw), so unknown fields, number formats and escapes reach
the engine as the client wrote them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]

_FIELDS = msgspec.json.Decoder(Fields)
_ENCODER = msgspec.json.Encoder()


def read_fields(body: bytes) -> Fields:
    """Raises msgspec.DecodeError (malformed JSON, or not an object)."""
    return _FIELDS.decode(body)


def write_fields(fields: Fields) -> bytes:
    return _ENCODER.encode(fields)


def with_field(fields: Fields, name: str, value: Any) -> Fields:
    """A copy with one field set."""
    return {**fields, name: msgspec.Raw(_ENCODER.encode(value))}


def without_fields(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


_FALSE, _ONE = msgspec.Raw(b"false"), msgspec.Raw(b"1")


def prefill_fields(fields: Fields) -> Fields:
    """The request as a prefill engine shall see it: the whole prompt, one token, no stream.

    As vLLM's own disaggregation proxies do it (0.32): `min_tokens` would exceed the one token asked for, and
    `stream_options` is refused without `stream`. `n` samples share one prompt, so one is enough.
    """
    changed = without_fields(fields, "stream_options", "min_tokens", "min_completion_tokens", "best_of")
    changed.update(stream=_FALSE, max_tokens=_ONE)
    if "max_completion_tokens" in fields:
        changed["max_completion_tokens"] = _ONE
    if "n" in fields:
        changed["n"] = _ONE
    return changed


def with_transfer_params(fields: Fields, values: Mapping[str, Any]) -> Fields:
    """Sets these of `kv_transfer_params`, keeping what else the client put there."""
    given = fields.get("kv_transfer_params")
    params: Fields = {}
    if given is not None:
        try:
            params = _FIELDS.decode(given)
        except msgspec.DecodeError:
            params = {}  # null, or not an object: nothing an engine could use
    return with_field(fields, "kv_transfer_params", {**params, **values})
