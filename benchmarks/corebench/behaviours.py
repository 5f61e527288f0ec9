"""What a router that follows KV events must get right, tried by publishing and asking: who holds what now?

Each case has an engine of its own. It ends with a block that has nothing to do with the case; once that one
is known, everything before has been taken in, and the answer is final.
"""

import random
from collections.abc import Callable, Sequence

import msgspec

from corebench.inputs import BLOCK_TOKENS, random_names, random_tokens, stored
from corebench.publishing import Engines
from corebench.systems import Subject
from corebench.waiting import wait_until
from kvcore.wire.events import AllBlocksCleared, BlockRemoved

_KNOWN_TIMEOUT_S = 5.0
_BLOCKS = 4
_CUT_AT = 2


class Prompt(msgspec.Struct, frozen=True):
    """One that an engine has cached."""

    names: list[int]
    token_ids: list[int]

    @classmethod
    def drawn(cls, rng: random.Random, blocks: int = _BLOCKS) -> "Prompt":
        return cls(random_names(rng, blocks), random_tokens(rng, blocks * BLOCK_TOKENS))


class Engine:
    """Publishes for one case."""

    def __init__(self, engines: Engines, number: int, rng: random.Random) -> None:
        self._engines, self._number = engines, number
        self.one, self.other = Prompt.drawn(rng), Prompt.drawn(rng)

    def store(self, prompt: Prompt, seq: int | None = None) -> None:
        self._engines.publish_events(self._number, [stored(prompt.names, prompt.token_ids)], seq)

    def remove(self, names: Sequence[int]) -> None:
        self._engines.publish_events(self._number, [BlockRemoved(names)])

    def clear(self) -> None:
        self._engines.publish_events(self._number, [AllBlocksCleared()])

    def lose(self) -> None:
        """The next batch will be one too late."""
        self._engines.next_seq[self._number] += 1

    def raw(self, events: Sequence[object]) -> None:
        self._engines.publish(self._number, msgspec.msgpack.encode([1.0, events, 0]))


class Behaviour(msgspec.Struct, frozen=True):
    """`act` publishes; then so many leading blocks of `one` and `other` must be known to be held."""

    name: str
    act: Callable[[Engine], None]
    one: int
    other: int = 0


def _as_map(prompt: Prompt, names: Sequence[object]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": prompt.token_ids,
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _digests(names: Sequence[int]) -> list[bytes]:
    return [name.to_bytes(8, "big") * 4 for name in names]


def _map_events(engine: Engine) -> None:
    engine.raw([_as_map(engine.one, engine.one.names)])


def _array_events(engine: Engine) -> None:
    one = engine.one
    engine.raw([["BlockStored", one.names, None, one.token_ids, BLOCK_TOKENS, None, "GPU"]])


def _signed_hashes(engine: Engine) -> None:
    engine.raw([_as_map(engine.one, [-name >> 1 for name in engine.one.names])])


def _digest_hashes(engine: Engine) -> None:
    engine.raw([_as_map(engine.one, _digests(engine.one.names))])


def _digest_removal(engine: Engine) -> None:
    _digest_hashes(engine)
    gone = _digests(engine.one.names)[_CUT_AT:]
    engine.raw([{"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}])


def _bad_event(engine: Engine) -> None:
    engine.raw([_as_map(engine.one, engine.one.names), {"type": "BlockStored", "block_hashes": "?"}])


def _new_event_type(engine: Engine) -> None:
    engine.raw([_as_map(engine.one, engine.one.names), {"type": "BlockMoved", "block_hashes": [1]}])


def _adapter(engine: Engine) -> None:
    with_adapter = {**_as_map(engine.one, engine.one.names), "lora_id": 1, "lora_name": "adapter"}
    engine.raw([with_adapter])


def _cleared(engine: Engine) -> None:
    engine.store(engine.one)
    engine.clear()
    engine.store(engine.other)


def _removed(engine: Engine) -> None:
    engine.store(engine.one)
    engine.remove(engine.one.names[_CUT_AT:])


def _restart(engine: Engine) -> None:
    engine.store(engine.one)
    engine.store(engine.other, seq=0)


def _gap(engine: Engine) -> None:
    engine.store(engine.one)
    engine.lose()  # that it was removed, for instance
    engine.store(engine.other)


BEHAVIOURS = (
    Behaviour("events as maps (vLLM 0.32, SGLang 0.5.23)", _map_events, _BLOCKS),
    Behaviour("events as arrays (vLLM up to 0.23)", _array_events, _BLOCKS),
    Behaviour("signed hashes (SGLang)", _signed_hashes, _BLOCKS),
    Behaviour("hashes of 32 bytes (vLLM by setting)", _digest_hashes, _BLOCKS),
    Behaviour("... removed again from the third block on", _digest_removal, _CUT_AT),
    Behaviour("blocks are removed from the third on", _removed, _CUT_AT),
    Behaviour("all blocks are cleared, others come", _cleared, 0, _BLOCKS),
    Behaviour("an engine restarts: numbers begin at 0 again", _restart, 0, _BLOCKS),
    Behaviour("a batch is lost and nobody can replay it", _gap, 0, _BLOCKS),
    Behaviour("a malformed event costs its batch nothing else", _bad_event, _BLOCKS),
    Behaviour("so does one of an unknown type", _new_event_type, _BLOCKS),
    Behaviour("an adapter's blocks are not the base model's", _adapter, 0),
)


class Outcome(msgspec.Struct, frozen=True):
    """Of one behaviour and system. `detail`: what it believed instead, "" when it is right."""

    behaviour: str
    system: str
    detail: str

    @property
    def is_right(self) -> bool:
        return not self.detail


def try_all(subject: Subject, seed: int = 1) -> list[Outcome]:
    """With a subject that follows nobody yet."""
    rng = random.Random(seed)
    outcomes = []
    with Engines(len(BEHAVIOURS)) as engines:
        for number, endpoint in enumerate(engines.endpoints):
            subject.call("follow", number, endpoint)
        engines.wait_heard()
        for number, behaviour in enumerate(BEHAVIOURS):
            engine, last = Engine(engines, number, rng), Prompt.drawn(rng, 1)
            behaviour.act(engine)
            engine.store(last)
            detail = _difference(subject, number, behaviour, engine, last)
            outcomes.append(Outcome(behaviour.name, subject.system.name, detail))
    return outcomes


def _difference(subject: Subject, number: int, behaviour: Behaviour, engine: Engine, last: Prompt) -> str:
    if not wait_until(lambda: subject.depths(last.token_ids).get(number) == 1, _KNOWN_TIMEOUT_S):
        return "knows nothing that came later"
    one = subject.depths(engine.one.token_ids).get(number, 0)
    other = subject.depths(engine.other.token_ids).get(number, 0)
    if (one, other) == (behaviour.one, behaviour.other):
        return ""
    if one > behaviour.one:
        return f"believes in {one} blocks, right is {behaviour.one}"
    return f"knows {one + other} blocks of {behaviour.one + behaviour.other}"
