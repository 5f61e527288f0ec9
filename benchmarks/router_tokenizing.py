"""What tokenising a prompt costs when its prefix is known, beside encoding it whole.

    python -m benchmarks.router_tokenizing --tokenizer MODEL_DIRECTORY [--size 32768] [--rounds 30]

CPU time of this thread, best and median of the rounds. Each round appends another question to the same long
conversation, as chats do, so what is new in it was never seen before.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from router.core.block_hash import TOKEN_BYTES, chain
from router.prompts.tokenizer import Tokenizer, load_tokenizer

_WORDS = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by "
    "words but not what all were we when your can said there use an each which she do how their if will up "
    "throughput latency scheduling 2048 cache, prefix: attention; tokens. (layer) \"quoted\" it's don't"
)


def prose(size: int, seed: int) -> str:
    draw = random.Random(seed)
    text = ""
    while len(text) < size:
        text += " ".join(draw.choice(_WORDS.split()) for _ in range(100)) + ".\n"
    return text[:size]


def cpu_us(function: Callable[[], object]) -> float:
    begin = time.thread_time()
    function()
    return (time.thread_time() - begin) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--size", type=int, default=32768, help="characters of the conversation so far")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()

    def fresh() -> Tokenizer:
        return load_tokenizer(args.tokenizer, 256 << 20)

    warm, whole = fresh(), fresh()
    if not warm.reuses_prefixes:
        print("this tokenizer's texts cannot be cut: prefixes are not reused")
    conversation = prose(args.size, 0)
    questions = [prose(200, seed) for seed in range(1, args.rounds + 1)]
    others = [prose(args.size, seed) for seed in range(1, args.rounds + 1)]
    warm.encode(conversation)
    ids = warm.encode(conversation)
    figures = {
        "whole": [cpu_us(partial(whole.encode, text)) for text in others],
        "after a known prefix": [cpu_us(partial(warm.encode, conversation + q)) for q in questions],
        "known": [cpu_us(lambda: warm.encode(conversation)) for _ in range(args.rounds)],
        "hash chain": [cpu_us(lambda: chain(ids, 16 * TOKEN_BYTES, 0, None)) for _ in range(args.rounds)],
    }
    print(f"{len(conversation)} characters, {len(ids) // TOKEN_BYTES} tokens")
    for name, times in figures.items():
        print(f"{name:22} best {min(times):9.1f} us   median {statistics.median(times):9.1f} us")
    ratio = statistics.median(figures["after a known prefix"]) / statistics.median(figures["whole"])
    print(f"after a known prefix / whole: {ratio:.3f}")


if __name__ == "__main__":
    main()
