"""What the scheduler side remembers of one request: its blocks, and which of them the store has."""

from collections.abc import Sequence
from typing import Any

from mooncake_connector.pd import PDParams


class RequestState:
    """`request` is vLLM's Request; its block_hashes grow while it decodes.

    Blocks are counted from the start of the request. `num_handled_blocks`: so many leading blocks need no
    save any more, because they are in the store or were given to the worker to save.
    """

    def __init__(self, request: Any, pd: PDParams | None, variant: bytes | None) -> None:
        self.request = request
        self.pd = pd
        self.variant = variant  # None: its blocks are not shared
        self.block_ids: list[int] = []
        self.num_handled_blocks = 0
        self.num_local_blocks = 0  # found in this engine's own prefix cache at the last match
        self.num_saved_blocks = 0
        self.first_loaded_block = 0
        self.num_loaded_blocks = 0
        self.follows = False  # the pending load follows a prefill engine
        self.load_failed = False

    @property
    def is_prefill_leg(self) -> bool:
        return self.pd is not None and self.pd.role == "prefill"

    @property
    def is_decode_leg(self) -> bool:
        return self.pd is not None and self.pd.role == "decode"

    @property
    def may_follow(self) -> bool:
        """A decode leg trusts its prefill engine once; preempted or failed, it takes what the store has."""
        return self.is_decode_leg and not self.load_failed and not self.request.num_preemptions

    @property
    def needs_every_token(self) -> bool:
        """Its answer has something for every token of the prompt (prompt_logprobs, token_embed), which only
        computing them gives. vLLM itself sees to it since some version between 0.28 and 0.32."""
        return bool(self.request.skip_reading_prefix_cache)

    def loadable_blocks(self, block_size_tokens: int) -> int:
        """Full blocks that may come from elsewhere: at least one token is left to compute logits from."""
        full = (self.request.num_tokens - 1) // block_size_tokens
        return int(min(full, len(self.request.block_hashes)))

    def first_lost_block(self, lost: set[int]) -> int | None:
        for index, block_id in enumerate(self.block_ids):
            if block_id in lost:
                return index
        return None

    def hashes(self, begin: int, end: int) -> list[bytes]:
        hashes: Sequence[bytes] = self.request.block_hashes[begin:end]
        return [bytes(block_hash) for block_hash in hashes]
