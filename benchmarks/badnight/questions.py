"""What is asked in a bad night: a fixed set of prompts that begin alike, whose answers are known before."""

import random
from typing import Any, NamedTuple

MAX_TOKENS = 20
_NUM_DOCUMENTS, _DOCUMENT_TOKENS = 10, 1200
_QUESTIONS_PER_DOCUMENT = 4
# Ids of bytes: an answer of the tiny model is one token a byte, and so are its prompts.
_TOKEN_IDS = range(10, 250)
# They change nothing about an answer and everything about whose KV it may come from.
_SALTS = (None, None, None, "red", "blue")


class Question(NamedTuple):
    """One request: `number` is that of its prompt. `leaves_after`: its client goes after so many events; 0:
    it stays to the end."""

    number: int
    streams: bool
    salt: str | None = None
    leaves_after: int = 0


def prompts() -> list[list[int]]:
    """Of all questions. The same in every night, whatever its seed."""
    rng = random.Random("documents")
    documents = [rng.choices(_TOKEN_IDS, k=_DOCUMENT_TOKENS) for _ in range(_NUM_DOCUMENTS)]
    return [
        document[: rng.randrange(200, _DOCUMENT_TOKENS)] + rng.choices(_TOKEN_IDS, k=rng.randrange(1, 60))
        for document in documents
        for _ in range(_QUESTIONS_PER_DOCUMENT)
    ]


def draw_question(rng: random.Random, num_prompts: int) -> Question:
    """Some prompts are asked for much more often than others."""
    number = int(rng.random() ** 2 * num_prompts)
    streams = rng.random() < 0.7
    leaves = streams and rng.random() < 0.15
    return Question(number, streams, rng.choice(_SALTS), rng.randint(1, 8) if leaves else 0)


def body_of(question: Question, prompt: list[int], model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": question.streams,
        "return_token_ids": True,
    }
    if question.salt is not None:
        body["cache_salt"] = question.salt
    return body
