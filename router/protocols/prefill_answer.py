"""What a prefill engine's complete answer says that anybody needs."""

import msgspec

from router.http.leg import Leg, decode_body


class _Details(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens_details: _Details | None = None


class PrefillAnswer(msgspec.Struct, frozen=True, gc=False):
    """`kv_transfer_params` as the engine wrote them."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None

    @property
    def has_params(self) -> bool:
        return bytes(self.kv_transfer_params) != b"null"

    @property
    def cached_tokens(self) -> int | None:
        """None when the engine does not say (vLLM: without --enable-prompt-tokens-details)."""
        if self.usage is None or self.usage.prompt_tokens_details is None:
            return None
        return self.usage.prompt_tokens_details.cached_tokens


_ANSWER = msgspec.json.Decoder(PrefillAnswer)
_NOTHING = PrefillAnswer()


def read_prefill_answer(leg: Leg) -> PrefillAnswer:
    """Says nothing when it cannot be read: then nothing is known, and nothing is wrong."""
    if leg.truncated:
        return _NOTHING
    try:
        return _ANSWER.decode(decode_body(leg.held_response()))
    except msgspec.DecodeError:
        return _NOTHING
