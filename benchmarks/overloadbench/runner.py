"""A turn of one admission policy: a cluster and a router of its own, offered a round's requests."""

import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace
from routersoak.cluster import RouterProcess
from storebench.processes import Process, SystemFailed

from overloadbench.client import Answer, ask, body_of
from overloadbench.engine import CACHED_TOKENS_TOTAL, DECODES_TOTAL, PREFILLS_TOTAL, PROMPT_TOKENS_TOTAL
from overloadbench.plan import Request, Setup
from router.profile import as_toml

_READY_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 300.0
_FOREVER_MS = 86_400_000
_BENCHMARKS = Path(__file__).resolve().parents[1]


class Figures(msgspec.Struct, kw_only=True):
    """Of the requests sent after the warm-up; `prefilled_in_vain`, `failures` and `cached_share` (of the
    prompt tokens that were prefilled) are of all. Times in ms. `good_tokens`: prompt and output tokens of
    those that kept both SLOs. `late_p99_ms`: how late requests were sent, a measure of what else the machine
    did."""

    admission: str
    round: int
    offered: int
    answered: int
    met_slo: int
    good_tokens: int
    refused: dict[str, int]
    prefilled_in_vain: int
    cached_share: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    tbt_p50_ms: float
    tbt_p90_ms: float
    late_p99_ms: float
    failures: list[str]

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


def run_turn(
    setup: Setup,
    offered: Sequence[Request],
    admission: str,
    round_number: int,
    folder: Path,
    progress: Callable[[], None],
) -> Figures:
    """`progress` is called once for each request that is over. SystemFailed when something does not start."""
    folder.mkdir()
    played = setup.as_played()
    cluster = folder / "setup.json"
    cluster.write_bytes(msgspec.json.encode(played))
    (folder / "router.toml").write_text(_router_toml(played, admission))
    log = folder / "engines.log"
    engines = Process(
        [sys.executable, "-m", "overloadbench.engine", str(cluster)],
        log,
        environment={"PYTHONPATH": f"{_BENCHMARKS.parent}:{_BENCHMARKS}"},
    )
    try:
        engines.wait_until(lambda: log.read_text().endswith("\n"), _READY_TIMEOUT_S, "the stand-in engines")
        ports: list[int] = json.loads(log.read_text())
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        pools = [("--prefill" if at < setup.num_prefill else "--decode", url) for at, url in enumerate(urls)]
        flags = ["--config", str(folder / "router.toml"), *(word for pair in pools for word in pair)]
        router = RouterProcess(admission, flags, folder)
        try:
            offering = _offer(setup.compress, offered, router.port, ports, progress)
            answers, counted = asyncio.run(offering)
            return summed_up(setup, admission, round_number, answers, counted)
        finally:
            router.process.stop()
    finally:
        engines.stop()


def _router_toml(played: Setup, admission: str) -> str:
    index = ""
    if played.block_size_tokens:
        # The engines forget nothing, so where a prompt was sent its prefix stays.
        index = f"[index]\nblock_size_tokens = {played.block_size_tokens}\npredicted_ttl_ms = {_FOREVER_MS}\n"
    return (
        'pd_protocol = "nixl"\npolicy = "global_cache_aware"\ndecode_policy = "least_tbt"\n'
        f"{index}"
        f'[scheduling]\nadmission = "{admission}"\n'
        f"ttft_slo_ms = {played.ttft_slo_ms * played.router_share}\n"
        f"tbt_slo_ms = {played.tbt_slo_ms * played.router_share}\n"
        f"expected_output_tokens = {played.expected_output_tokens}\ndecode_ms = {played.decode_ms}\n"
        + as_toml(played.models.prefill, played.models.decode)
    )


class Counted(msgspec.Struct, frozen=True):
    """What the engines say that they did."""

    prefilled_in_vain: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


async def _offer(
    compress: float,
    offered: Sequence[Request],
    port: int,
    engine_ports: Sequence[int],
    progress: Callable[[], None],
) -> tuple[list[Answer], Counted]:
    """Answers in the engines' time."""
    bodies = [body_of(request) for request in offered]  # before anything is timed
    began = time.monotonic()

    async def client(request: Request, body: bytes) -> Answer:
        due_at = began + request.at_s / compress
        await asyncio.sleep(due_at - time.monotonic())
        late_ms = (time.monotonic() - due_at) * 1e3
        answer = await ask(port, request, body, _ANSWER_TIMEOUT_S)
        progress()
        return replace(answer, late_ms=late_ms).slower(compress)

    answers = await asyncio.gather(*map(client, offered, bodies))
    texts = [await _metrics(engine_port) for engine_port in engine_ports]
    in_vain = _total(texts, PREFILLS_TOTAL) - _total(texts, DECODES_TOTAL)
    return answers, Counted(in_vain, _total(texts, PROMPT_TOKENS_TOTAL), _total(texts, CACHED_TOKENS_TOTAL))


def summed_up(
    setup: Setup, admission: str, round_number: int, answers: Sequence[Answer], engines: Counted
) -> Figures:
    counted = [answer for answer in answers if answer.at_s >= setup.warm_up_s]
    whole = [answer for answer in counted if not answer.refused and not answer.failed]
    good = [answer for answer in whole if answer.meets(setup.ttft_slo_ms, setup.tbt_slo_ms)]
    ttfts = sorted(answer.ttft_ms for answer in whole)
    tbts = sorted(answer.tbt_ms for answer in whole)
    return Figures(
        admission=admission,
        round=round_number,
        offered=len(counted),
        answered=len(whole),
        met_slo=len(good),
        good_tokens=sum(answer.tokens for answer in good),
        refused=dict(Counter(answer.refused for answer in counted if answer.refused).most_common()),
        prefilled_in_vain=engines.prefilled_in_vain,
        cached_share=engines.cached_tokens / max(engines.prompt_tokens, 1),
        ttft_p50_ms=quantile(ttfts, 0.5),
        ttft_p90_ms=quantile(ttfts, 0.9),
        tbt_p50_ms=quantile(tbts, 0.5),
        tbt_p90_ms=quantile(tbts, 0.9),
        late_p99_ms=quantile(sorted(answer.late_ms for answer in answers), 0.99),
        failures=sorted({answer.failed for answer in answers if answer.failed}),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of values in order; 0 when there are none."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


def added(figures: Sequence[Figures]) -> Figures:
    """Rounds of one admission policy together: counts added, times as the mean over rounds."""
    refused: Counter[str] = Counter()
    for one in figures:
        refused.update(one.refused)
    values = [asdict(one) for one in figures]
    names = ("offered", "answered", "met_slo", "good_tokens", "prefilled_in_vain")
    counts = {name: sum(v[name] for v in values) for name in names}
    means = [name for name in values[0] if name.endswith(("_ms", "_share"))]
    times = {name: sum(v[name] for v in values) / len(values) for name in means}
    return Figures(
        admission=figures[0].admission,
        round=len(figures),
        refused=dict(refused.most_common()),
        failures=sorted({text for one in figures for text in one.failures}),
        **counts,
        **times,
    )


async def _metrics(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: bench\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return (await reader.readexactly(length)).decode()
    except (OSError, asyncio.IncompleteReadError) as error:
        raise SystemFailed(f"a stand-in engine does not tell what it did: {error!r}") from error
    finally:
        writer.close()


def _total(texts: Sequence[str], name: str) -> int:
    return sum(
        int(value) for text in texts for value in re.findall(rf"^{name}{{.*}} (\d+)$", text, re.MULTILINE)
    )
