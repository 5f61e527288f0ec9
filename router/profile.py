"""`mooncake-router profile`: measures a live engine and prints the models that predictions start from.

Prefill: time to the first token of prompts of several lengths, each new and with prefixes the engine has just
computed. Decode: time between tokens of several batch sizes and context lengths. Prompts are random token
ids, so nothing but what is measured is cached. The engine should be idle and have its prefix cache on.
"""

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from kvcore.errors import ConfigError
from router.core.estimator import DecodeModel, PrefillModel
from router.core.fitting import DecodeSample, PrefillSample, fit_decode, fit_prefill, relative_errors
from router.instance_spec import parse_instance_url

_PREFIX_SHARES = (0.0, 0.5, 0.9)
_TIMEOUT_S = 600.0


class Plan(msgspec.Struct, frozen=True):
    """`lengths` and `contexts` in tokens, `batches` in requests; each point is measured `repeats` times."""

    lengths: Sequence[int]
    batches: Sequence[int]
    contexts: Sequence[int]
    decode_tokens: int
    repeats: int
    block_size_tokens: int


# (prompt, tokens to generate) -> milliseconds from sending to each token
Generate = Callable[[list[int], int], Awaitable[list[float]]]


async def measure(
    plan: Plan, generate: Generate, draw: random.Random, vocabulary: int
) -> tuple[list[PrefillSample], list[DecodeSample]]:
    """Each point once for each repeat; of repeats the fastest counts, for whatever else runs only adds."""

    def prompt(length: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    await generate(prompt(plan.lengths[0]), 2)  # the first request of an engine's life is slow
    prefills: list[PrefillSample] = []
    for length in plan.lengths:
        for share in _PREFIX_SHARES:
            prefix = int(length * share) // plan.block_size_tokens * plan.block_size_tokens
            if share and not prefix:
                continue
            times = []
            for _ in range(plan.repeats):
                shared = prompt(prefix)
                if shared:
                    await generate(shared, 1)
                times.append((await generate(shared + prompt(length - prefix), 1))[0])
            prefills.append(PrefillSample(length, prefix, min(times)))
    decodes: list[DecodeSample] = []
    for batch in plan.batches:
        for context in plan.contexts:
            times = []
            for _ in range(plan.repeats):
                answers = await asyncio.gather(
                    *(generate(prompt(context), plan.decode_tokens) for _ in range(batch))
                )
                times.append(_tbt_ms(answers))
            decodes.append(DecodeSample(batch, batch * (context + plan.decode_tokens // 2), min(times)))
    return prefills, decodes


def _tbt_ms(answers: Sequence[Sequence[float]]) -> float:
    """Mean time between tokens while all of the batch decode; median over its requests.

    A mean over the whole stretch: engines and sockets may hand over several tokens at once.
    """
    begin = max(times[0] for times in answers)
    means = []
    for times in answers:
        together = [at for at in times if at >= begin]
        if len(together) > 1:
            means.append((together[-1] - together[0]) / (len(together) - 1))
    if not means or not statistics.median(means):
        raise ConfigError("the requests of a batch never decoded together: raise --decode-tokens")
    return statistics.median(means)


def as_toml(prefill: PrefillModel, decode: DecodeModel) -> str:
    lines = []
    for name, model in (("prefill_model", prefill), ("decode_model", decode)):
        lines.append(f"[scheduling.{name}]")
        lines += [f"{field} = {value!r}" for field, value in msgspec.structs.asdict(model).items()]
        lines.append("")
    return "\n".join(lines)


class Engine:
    """Streams completions of token ids from one engine; a connection for each."""

    def __init__(self, url: str, model: str, api_key: str) -> None:
        self._host, self._port = parse_instance_url(url)
        self._model = model
        self._key_line = f"authorization: Bearer {api_key}\r\n" if api_key else ""

    async def generate(self, prompt: list[int], max_tokens: int) -> list[float]:
        """ConfigError, with the engine's words, when it refuses."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "stream": True,
                "ignore_eos": True,
                "temperature": 0,
            }
        )
        try:
            return await asyncio.wait_for(self._exchange(body), _TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ConfigError(f"the engine did not answer within {_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise ConfigError(f"the engine at {self._host}:{self._port}: {error}") from error

    async def _exchange(self, body: bytes) -> list[float]:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            begin = loop.time()
            head_lines = (
                f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\n{self._key_line}"
                f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head_lines.encode() + body)
            times: list[float] = []
            head = await reader.readline()
            if b" 200" not in head:
                text = (head + await reader.read(2000)).decode("latin-1")
                raise ConfigError(f"the engine refused a request of the profile: {text}")
            while line := await reader.readline():
                if line.startswith(b"data: [DONE]"):
                    break
                if line.startswith(b"data: "):
                    times.append((loop.time() - begin) * 1e3)
            if not times:
                raise ConfigError("the engine ended a stream without a token")
            return times
        finally:
            writer.close()


def make_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        "mooncake-router profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Append what it prints to router.toml.",
    )
    parser.add_argument("--url", required=True, help="an idle engine, http://HOST:PORT")
    parser.add_argument("--model", required=True, help="the name it serves")
    parser.add_argument("--api-key", default="", help="if it wants one")
    parser.add_argument(
        "--lengths", type=numbers, default=[256, 1024, 2048, 4096, 8192], help="prompt tokens"
    )
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], help="requests decoding together")
    parser.add_argument(
        "--contexts", type=numbers, default=[128, 1024], help="tokens each has before it decodes"
    )
    parser.add_argument("--decode-tokens", type=int, default=64, help="that each generates")
    parser.add_argument("--repeats", type=int, default=3, help="of each point; the fastest counts")
    parser.add_argument("--block-size", type=int, default=16, help="the engine's")
    parser.add_argument("--vocabulary", type=int, default=1000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status 0, or 2 with a hint when nothing could be measured."""
    args = make_parser().parse_args(argv)
    plan = Plan(args.lengths, args.batches, args.contexts, args.decode_tokens, args.repeats, args.block_size)
    try:
        engine = Engine(args.url, args.model, args.api_key)
        # Another prompt for each seed, so that a second run does not meet the first one's cache.
        draw = random.Random(args.seed)
        prefills, decodes = asyncio.run(measure(plan, engine.generate, draw, args.vocabulary))
        prefill, decode = fit_prefill(prefills), fit_decode(decodes)
    except ConfigError as error:
        print(f"mooncake-router profile: {error}", file=sys.stderr)
        return 2
    print(_summary(args.url, prefill, prefills, decodes) + as_toml(prefill, decode))
    return 0


def _summary(
    url: str, prefill: PrefillModel, prefills: Sequence[PrefillSample], decodes: Sequence[Any]
) -> str:
    errors = relative_errors(prefill, prefills)
    median, worst = statistics.median(errors), max(errors)
    return (
        f"# Measured on {url}: {len(prefills)} prefill and {len(decodes)} decode points. The prefill model\n"
        f"# is within {median:.1%} of a measurement (median), {worst:.1%} at worst.\n"
    )
