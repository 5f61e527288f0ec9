"""How a leg's body differs from the client's. Pure.

Values are moved as the bytes they came in (msgspec.Raw), so unknown fields, number formats and escapes reach
the engine as the client wrote them.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]

_FIELDS = msgspec.json.Decoder(Fields)
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ENCODER = msgspec.json.Encoder()


def read_fields(body: bytes) -> Fields:
    """Raises msgspec.DecodeError (malformed JSON, nested too deeply, or not an object)."""
    try:
        return _FIELDS.decode(body)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


def num_samples(fields: Fields) -> int:
    """`n`, as vLLM and SGLang read it: "2" and 2.0 are 2 (pydantic). 1 when it is none they would take."""
    try:
        value = msgspec.json.decode(fields.get("n", b"1"))
        return max(int(value), 1) if isinstance(value, (int, float, str)) else 1
    except (ValueError, OverflowError, RecursionError):
        return 1


def num_sequences(fields: Fields) -> int:
    """What one body asks to be decoded: several samples of each of several prompts."""
    return num_prompts(fields) * num_samples(fields)


def num_prompts(fields: Fields) -> int:
    """Prompts of a completion: `prompt` may be a list of texts or of lists of token ids, and beside it vLLM
    takes `prompt_embeds`, one or several."""
    return max(1, _num_items(fields.get("prompt")) + _num_items(fields.get("prompt_embeds")))


def _num_items(value: msgspec.Raw | None) -> int:
    if value is None:
        return 0
    raw = bytes(value)
    if raw[:1] != b"[":
        return int(raw != b"null")
    if raw[1:64].lstrip()[:1] not in (b'"', b"["):
        return 1  # token ids; thousands, maybe
    try:
        return len(_LIST.decode(raw))
    except RecursionError:
        return 1  # the engine's to refuse


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
        except (msgspec.DecodeError, RecursionError):
            params = {}  # null, or not an object: nothing an engine could use
    return with_field(fields, "kv_transfer_params", {**params, **values})
