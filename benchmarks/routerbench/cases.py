"""What is measured: kinds of load, and the requests of each. Pure."""

import itertools
import json
import random
from collections.abc import Iterator

import msgspec

CHUNKS = 64
NUM_GROUPS = 16
_SHARED_SHARE = 0.9


class Case(msgspec.Struct, frozen=True):
    """`prompt_bytes`: of each prompt, as text; small ones are all alike."""

    about: str
    connections: int
    prompt_bytes: int = 20
    stream: bool = False
    separate_prefill: bool = False

    @property
    def has_prompts(self) -> bool:
        """Long ones, so that reading them costs something."""
        return self.prompt_bytes >= 1024


CASES = {
    "a1": Case("110 B body, 1 connection", 1),
    "a32": Case("110 B body, 32 connections", 32),
    "b1": Case(f"1 stream of {CHUNKS} chunks", 1, stream=True),
    "b128": Case(f"128 streams of {CHUNKS} chunks", 128, stream=True),
    "c4k": Case("4 KiB prompts, 32 connections", 32, 4 << 10),
    "c32k": Case("32 KiB prompts, 32 connections", 32, 32 << 10),
    "pd32": Case("110 B body, 32 connections, prefill apart", 32, separate_prefill=True),
    "pdb128": Case(f"128 streams of {CHUNKS} chunks, prefill apart", 128, stream=True, separate_prefill=True),
}


def bodies(case: Case) -> Iterator[bytes]:
    """Of chat completions, without end. Long prompts begin as one of NUM_GROUPS and then are like no other,
    as those of users are."""
    if not case.has_prompts:
        return itertools.repeat(_body(case, "x" * case.prompt_bytes))
    return _grouped(case)


def _grouped(case: Case) -> Iterator[bytes]:
    rng = random.Random(0)
    shared_bytes = int(case.prompt_bytes * _SHARED_SHARE)
    own_bytes = case.prompt_bytes - shared_bytes
    halves = [_body(case, f"{_words(rng, shared_bytes)}|").partition(b"|") for _ in range(NUM_GROUPS)]
    # Slices of it differ from their first letters on; drawing each letter would take longer than sending it.
    pool = _words(rng, 1 << 20).encode()
    while True:
        start = rng.randrange(len(pool) - own_bytes)
        before, _, after = halves[rng.randrange(NUM_GROUPS)]
        yield before + pool[start : start + own_bytes] + after


def _body(case: Case, prompt: str) -> bytes:
    return json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": CHUNKS if case.stream else 8,
            "stream": case.stream,
        },
        separators=(",", ":"),
    ).encode()


def _words(rng: random.Random, num_bytes: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz    ", k=num_bytes))
