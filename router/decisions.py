"""The last decisions and what they were made from, for people: GET /decisions, and a response header."""

import itertools
import time
from collections import deque
from typing import Any

import msgspec

from router.core.decision import Decision

# A request that carries it (with any value) gets the decision about it in RESPONSE_HEADER.
REQUEST_HEADER = b"x-mooncake-explain"
RESPONSE_HEADER = b"x-mooncake-decision"
KEPT = 256


class Noted:
    __slots__ = ("decision", "prompt_tokens", "shown_id", "unix_time_s")

    def __init__(self, unix_time_s: float, shown_id: str, prompt_tokens: int, decision: Decision) -> None:
        self.unix_time_s = unix_time_s
        self.shown_id = shown_id
        self.prompt_tokens = prompt_tokens  # not the view: its block hashes may be many
        self.decision = decision

    def explained(self) -> dict[str, Any]:
        about = {"unix_time_s": self.unix_time_s, "request_id": self.shown_id}
        return about | explain(self.prompt_tokens, self.decision)


class DecisionLog:
    """Keeps the last KEPT decisions as they are; they are put into words only when somebody asks."""

    def __init__(self) -> None:
        self._noted: deque[Noted] = deque(maxlen=KEPT)

    def note(self, shown_id: str, prompt_tokens: int, decision: Decision) -> None:
        self._noted.append(Noted(time.time(), shown_id, prompt_tokens, decision))

    def newest_first(self, num_decisions: int = KEPT) -> list[Noted]:
        return list(itertools.islice(reversed(self._noted), num_decisions))


def explain(prompt_tokens: int, decision: Decision) -> dict[str, Any]:
    """Predicted times in ms, 0 where nothing was predicted. `cost` is what a policy minimised."""
    reject, transfer = decision.reject, decision.transfer
    return {
        "prompt_tokens": prompt_tokens,
        "prefill": decision.prefill.instance_id if decision.prefill is not None else None,
        "decode": decision.decode.instance_id if decision.decode is not None else None,
        "ttft_ms": round(decision.ttft_ms, 3),
        "tbt_ms": round(decision.tbt_ms, 3),
        "prefix_blocks": decision.prefill_choice.prefix_blocks if decision.prefill_choice is not None else 0,
        "reasons": decision.reasons,
        "rejected": msgspec.to_builtins(reject) if reject is not None and not decision.hold_ms else None,
        "held": msgspec.to_builtins(reject) if reject is not None and decision.hold_ms else None,
        "transfer": msgspec.to_builtins(transfer) if transfer is not None else None,
        "candidates": msgspec.to_builtins(decision.candidates),
    }


def header_line(prompt_tokens: int, decision: Decision) -> bytes:
    return b"%b: %b\r\n" % (RESPONSE_HEADER, msgspec.json.encode(explain(prompt_tokens, decision)))
