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
from msgspec.structs import asdict
from routersoak.cluster import RouterProcess
from storebench.processes import Process, SystemFailed

from overloadbench.client import Answer, ask
from overloadbench.engine import DECODES_TOTAL, PREFILLS_TOTAL
from overloadbench.plan import Plan, Request, requests
from router.profile import as_toml

_READY_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 300.0
_BENCHMARKS = Path(__file__).resolve().parents[1]


class Figures(msgspec.Struct, kw_only=True):
    """Of the requests sent after the warm-up; `prefilled_in_vain` and `failures` are of all. Times in ms."""

    admission: str
    round: int
    offered: int
    answered: int
    met_slo: int
    refused: dict[str, int]
    prefilled_in_vain: int
    ttft_p50_ms: float
    ttft_p90_ms: float
    tbt_p50_ms: float
    tbt_p90_ms: float
    failures: list[str]

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


def run_turn(
    plan: Plan, admission: str, round_number: int, folder: Path, progress: Callable[[], None]
) -> Figures:
    """`progress` is called once for each request that is over. SystemFailed when something does not start."""
    folder.mkdir()
    models = folder / "models.json"
    models.write_bytes(msgspec.json.encode(plan.models))
    (folder / "router.toml").write_text(_router_toml(plan, admission))
    command = [sys.executable, "-m", "overloadbench.engine", str(models), str(plan.num_prefill)]
    log = folder / "engines.log"
    engines = Process(
        [*command, str(plan.num_decode)],
        log,
        environment={"PYTHONPATH": f"{_BENCHMARKS.parent}:{_BENCHMARKS}"},
    )
    try:
        engines.wait_until(lambda: log.read_text().endswith("\n"), _READY_TIMEOUT_S, "the stand-in engines")
        ports: list[int] = json.loads(log.read_text())
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        pools = [("--prefill" if at < plan.num_prefill else "--decode", url) for at, url in enumerate(urls)]
        flags = ["--config", str(folder / "router.toml"), *(word for pair in pools for word in pair)]
        router = RouterProcess(admission, flags, folder)
        try:
            return asyncio.run(_offer(plan, admission, round_number, router.port, ports, progress))
        finally:
            router.process.stop()
    finally:
        engines.stop()


def _router_toml(plan: Plan, admission: str) -> str:
    return (
        'pd_protocol = "nixl"\npolicy = "global_cache_aware"\ndecode_policy = "least_tbt"\n'
        f'[scheduling]\nadmission = "{admission}"\n'
        f"ttft_slo_ms = {plan.ttft_slo_ms * plan.router_share}\n"
        f"tbt_slo_ms = {plan.tbt_slo_ms * plan.router_share}\n"
        f"expected_output_tokens = {plan.output_tokens}\ndecode_ms = {plan.decode_ms}\n"
        + as_toml(plan.models.prefill, plan.models.decode)
    )


async def _offer(
    plan: Plan,
    admission: str,
    round_number: int,
    port: int,
    engine_ports: Sequence[int],
    progress: Callable[[], None],
) -> Figures:
    offered = list(requests(plan, round_number))  # made before anything is timed
    began = time.monotonic()

    async def client(request: Request) -> Answer:
        await asyncio.sleep(began + request.at_s - time.monotonic())
        answer = await ask(port, request, _ANSWER_TIMEOUT_S)
        progress()
        return answer

    answers = await asyncio.gather(*(client(request) for request in offered))
    texts = [await _metrics(engine_port) for engine_port in engine_ports]
    in_vain = _total(texts, PREFILLS_TOTAL) - _total(texts, DECODES_TOTAL)
    return summed_up(plan, admission, round_number, answers, in_vain)


def summed_up(
    plan: Plan, admission: str, round_number: int, answers: Sequence[Answer], in_vain: int
) -> Figures:
    counted = [answer for answer in answers if answer.at_s >= plan.warm_up_s]
    whole = [answer for answer in counted if not answer.refused and not answer.failed]
    ttfts = sorted(answer.ttft_ms for answer in whole)
    tbts = sorted(answer.tbt_ms for answer in whole)
    return Figures(
        admission=admission,
        round=round_number,
        offered=len(counted),
        answered=len(whole),
        met_slo=sum(answer.meets(plan.ttft_slo_ms, plan.tbt_slo_ms) for answer in whole),
        refused=dict(Counter(answer.refused for answer in counted if answer.refused).most_common()),
        prefilled_in_vain=in_vain,
        ttft_p50_ms=quantile(ttfts, 0.5),
        ttft_p90_ms=quantile(ttfts, 0.9),
        tbt_p50_ms=quantile(tbts, 0.5),
        tbt_p90_ms=quantile(tbts, 0.9),
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
    counts = {name: sum(v[name] for v in values) for name in ("offered", "answered", "met_slo")}
    times = {name: sum(v[name] for v in values) / len(values) for name in values[0] if name.endswith("_ms")}
    return Figures(
        admission=figures[0].admission,
        round=len(figures),
        refused=dict(refused.most_common()),
        prefilled_in_vain=sum(one.prefilled_in_vain for one in figures),
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
