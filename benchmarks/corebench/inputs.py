"""What the router's core is measured with, and Dynamo beside it: prompts, names of blocks, batches of events.
Pure, and equal for equal seeds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import msgspec

from kvcore.wire.events import BlockRemoved, BlockStored, Event, encode_batch

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
WORKERS = 64
_UNDER_WAY_ON_EACH = 8  # requests on each worker while one is chosen
_UNDER_WAY_TOKENS = 2048

# Leading blocks of the prompt that each worker holds.
DEPTHS = {
    "all hold all": [PROMPT_BLOCKS] * WORKERS,
    "4 different depths": [(512, 100, 256, 400)[n % 4] for n in range(WORKERS)],
    "64 different depths": [8 * (n + 1) for n in range(WORKERS)],
}
# A third of them, for choosing: the others have never seen it.
CHOICE_DEPTHS = [(512, 100, 256, 400)[n % 4] if n % 3 == 0 else 0 for n in range(WORKERS)]


class Inputs(msgspec.Struct, frozen=True):
    """`token_ids`: of one prompt; `names`: what an engine calls its blocks. `under_way`: prompts of other
    requests, some of them for each worker in turn."""

    token_ids: list[int]
    names: list[int]
    depths: dict[str, list[int]]
    under_way: list[list[int]]


def inputs(seed: int = 1) -> Inputs:
    rng = random.Random(seed)
    prompt, block_names = random_tokens(rng, PROMPT_BLOCKS * BLOCK_TOKENS), random_names(rng, PROMPT_BLOCKS)
    under_way = [random_tokens(rng, _UNDER_WAY_TOKENS) for _ in range(WORKERS * _UNDER_WAY_ON_EACH)]
    return Inputs(prompt, block_names, DEPTHS, under_way)


def stored(block_names: list[int], token_ids: list[int], parent: int | None = None) -> BlockStored:
    return BlockStored(block_names, parent, token_ids, BLOCK_TOKENS)


def growing_chains(seed: int, blocks_per_batch: int, batches: int) -> Iterator[bytes]:
    """Batches as an engine publishes them: each stores blocks of a chain that begins anew every 64 batches,
    every fourth is followed by their removal, as under cache pressure."""
    rng = random.Random(seed)
    parent = None
    for number in range(batches):
        block_names = random_names(rng, blocks_per_batch)
        parent = None if number % 64 == 0 else parent
        token_ids = random_tokens(rng, BLOCK_TOKENS * blocks_per_batch)
        events: list[Event] = [stored(block_names, token_ids, parent)]
        if number % 4 == 3:
            events.append(BlockRemoved(block_names[::-1]))
        else:
            parent = block_names[-1]
        yield encode_batch(1.0, events, 0)


def prompts(seed: int, blocks_per_batch: int) -> Iterator[bytes]:
    """Batches without end that only store: prompts of PROMPT_BLOCKS, prefilled in pieces."""
    rng = random.Random(seed)
    while True:
        parent = None
        for _ in range(PROMPT_BLOCKS // blocks_per_batch):
            block_names = random_names(rng, blocks_per_batch)
            token_ids = random_tokens(rng, BLOCK_TOKENS * blocks_per_batch)
            yield encode_batch(1.0, [stored(block_names, token_ids, parent)], 0)
            parent = block_names[-1]


def random_names(rng: random.Random, count: int) -> list[int]:
    return array("Q", rng.randbytes(8 * count)).tolist()


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return array("H", rng.randbytes(2 * count)).tolist()
