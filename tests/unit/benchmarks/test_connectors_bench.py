"""The connector benchmark without its engines: what is asked, what comes of the answers, who is left out."""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from connectorbench import engines
from connectorbench.engines import Engine, Engines
from connectorbench.figures import (
    PLAIN,
    Sample,
    identical,
    loaded_share,
    median_ms,
    ratio,
    reason,
)
from connectorbench.plan import (
    BESIDE,
    CACHED,
    COLD,
    OTHER,
    OWN,
    PHASES,
    SPLIT,
    STREAM,
    Plan,
    phases,
    prompts,
    turns,
)
from connectorbench.runner import Runner
from connectorbench.systems import SYSTEMS
from connectorbench.tables import against_lines, floor_line, reuse_table, split_table
from demo_lib.openai_client import Answer
from demo_lib.processes import DemoError
from rich.console import Console

PLAN = Plan(prompt_bytes=300)
TEXT = "".join(random.Random(0).choices("abcdefgh ", k=3000))


def sample(system: str, figure: str, round_number: int, ms: float, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "prompt": "document",
        "prompt_tokens": 100,
        "loaded_tokens": 0,
        "token_ids": [1, 2, 3],
        **changes,
    }
    return Sample(system=system, figure=figure, round=round_number, ms=ms, **fields)


def test_prompts_of_a_run_share_no_beginning_and_are_equally_long() -> None:
    found = [prompts(PLAN, TEXT, number) for number in range(12)]
    every = [text for one in found for text in one]
    assert len({text[:14] for text in every}) == len(every)
    long = [text for one in found for text in (one.document, one.beside, one.split)]
    assert len({len(text.partition(". ")[2]) for text in long}) == 1
    assert len({text[-100:] for text in long}) == len(long)
    assert found == [prompts(PLAN, TEXT, number) for number in range(12)]
    assert found[0] != prompts(Plan(prompt_bytes=300, seed=1), TEXT, 0)


def test_every_round_asks_everybody_and_another_begins() -> None:
    rounds = [turns("abc", number) for number in range(3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert [one[0] for one in rounds] == ["a", "b", "c"]


def test_a_ratio_is_that_within_rounds() -> None:
    samples = []
    for number, slowness in enumerate((1.0, 10.0, 3.0)):
        samples.append(sample(PLAIN, COLD, number, 1000.0 * slowness))
        samples.append(sample("ours-tcp", OTHER, number, 100.0 * slowness))
        samples.append(sample("ours-tcp", COLD, number, 1100.0 * slowness))
    found = ratio(samples, "ours-tcp", OTHER, PLAIN)
    assert found is not None and found.rounds == 3
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    cold = ratio(samples, "ours-tcp", COLD, PLAIN)
    assert cold is not None and cold.mean == pytest.approx(1.1)
    assert median_ms(samples, "ours-tcp", OTHER) == 300.0


def test_a_ratio_takes_rounds_that_both_have() -> None:
    samples = [sample(PLAIN, COLD, 0, 100.0), sample(PLAIN, COLD, 1, 100.0), sample("nixl", COLD, 1, 50.0)]
    found = ratio(samples, "nixl", COLD, PLAIN)
    assert found is not None and (found.mean, found.rounds) == (pytest.approx(0.5), 1)
    assert ratio(samples, "nixl", OTHER, PLAIN) is None
    assert ratio(samples, "ours-tcp", COLD, "nixl") is None


def test_peers_are_compared_in_the_same_figure() -> None:
    samples = [sample("a", OTHER, 0, 20.0), sample("b", OTHER, 0, 40.0), sample("b", COLD, 0, 400.0)]
    found = ratio(samples, "a", OTHER, "b")
    assert found is not None and found.mean == pytest.approx(0.5)


def test_tokens_are_those_of_plain_vllm_for_the_same_prompt() -> None:
    samples = [
        sample(PLAIN, COLD, 0, 1.0, token_ids=[1, 2]),
        sample(PLAIN, SPLIT, 0, 1.0, prompt="split", token_ids=[7, 8]),
        # What plain vLLM answers from its own cache is no second opinion.
        sample(PLAIN, CACHED, 0, 1.0, token_ids=[9, 9]),
        sample("nixl", COLD, 0, 1.0, token_ids=[1, 2]),
        sample("nixl", OTHER, 0, 1.0, token_ids=[1, 3]),
        sample("nixl", SPLIT, 0, 1.0, prompt="split", token_ids=[7, 8]),
        sample("nixl", COLD, 1, 1.0, token_ids=[4, 4]),
    ]
    assert identical(samples, "nixl") == (3, 2)


def test_what_was_loaded_is_a_share_of_what_was_asked() -> None:
    samples = [sample("a", OTHER, 0, 1.0, loaded_tokens=96), sample("a", OWN, 0, 1.0, loaded_tokens=0)]
    assert loaded_share(samples, "a", (OTHER,)) == 0.96
    assert loaded_share(samples, "a", (OTHER, OWN)) == 0.48
    assert loaded_share(samples, "b", (OTHER, OWN)) is None


LOG = """\
(EngineCore pid=7) INFO 11-30 16:30:00 [core.py:1] Initializing
(EngineCore pid=7) ERROR 11-30 16:30:01 [core.py:1126] EngineCore failed to start.
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)     raise NotImplementedError(
(EngineCore pid=7) NotImplementedError: only on devices
(APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}
"""


@pytest.mark.parametrize(
    ("error", "logs", "told"),
    [
        ("prefill ended with exit status 1:\n  much", LOG, "NotImplementedError: only on devices"),
        (
            "prefill was not ready within 600 s:\n  much",
            "INFO nothing",
            "prefill was not ready within 600 s:",
        ),
        ("", "", "no reason given"),
        ("x", "ERROR 11-30 [a.py:1] ValueError: bad", "ValueError: bad"),
    ],
)
def test_who_is_left_out_gets_one_line_that_says_why(error: str, logs: str, told: str) -> None:
    assert reason(error, logs) == told


def shown(table: Any) -> str:
    console = Console(width=250, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_tables_have_medians_ratios_shares_and_counts() -> None:
    samples = []
    for number in range(2):
        samples += [
            sample(PLAIN, COLD, number, 1000.0),
            sample(PLAIN, CACHED, number, 50.0),
            sample(PLAIN, STREAM, number, 20.0, prompt="stream"),
            sample(PLAIN, SPLIT, number, 900.0, prompt="split"),
            sample("ours-tcp", COLD, number, 1000.0),
            sample("ours-tcp", OTHER, number, 100.0, loaded_tokens=96),
            sample("ours-tcp", OWN, number, 90.0, loaded_tokens=96),
            sample("ours-tcp", STREAM, number, 21.0, prompt="stream", token_ids=[5]),
            sample("mooncake-store", OTHER, number, 200.0),
            sample("nixl", SPLIT, number, 990.0, prompt="split", loaded_tokens=99),
        ]
    text = shown(reuse_table(samples))
    (ours,) = (line for line in text.splitlines() if "ours-tcp" in line)
    assert "100 (0.10 [0.10, 0.10])" in ours and "21.0 (1.05 [1.05, 1.05])" in ours
    assert "96 %" in ours and "6 of 8" in ours
    assert "nixl" not in text and "mooncake-store" in text
    split = shown(split_table(samples))
    assert "990 (1.10 [1.10, 1.10])" in split and "99 %" in split and "ours-tcp" not in split
    assert floor_line(samples).startswith("The same prompt from vLLM's own cache: 50 ms (0.05")
    # Ours was not split here, so nothing is said about NIXL.
    assert against_lines(samples) == ["ours-tcp / mooncake-store: other 0.50 [0.50, 0.50]"]
    assert floor_line([sample("nixl", SPLIT, 0, 1.0)]) == ""


class StandIn:
    """An engine that writes down what it is asked, and fails when its system does."""

    def __init__(self, cluster: "Cluster", system: str, role: str) -> None:
        self.url = f"http://{system}/{role}"
        self._cluster, self._system, self._role = cluster, system, role

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        is_warm_up = prompt.startswith("Warming up")
        if not is_warm_up and self._cluster.fails.get(self._system) == "asked":
            raise DemoError(f"{self.url} answered 500")
        self._cluster.said.append((self._system, self._role, prompt.split(" ")[0]))
        return Answer("", [len(prompt)] * max_tokens, 100, 10.0, 4.0 * max_tokens)

    def loaded_tokens(self) -> int:
        return 96 * sum(said[:2] == (self._system, self._role) for said in self._cluster.said)

    def reset(self) -> None:
        self._cluster.said.append((self._system, self._role, "reset"))


class Cluster:
    def __init__(self, **fails: str) -> None:
        self.fails = {name.replace("_", "-"): when for name, when in fails.items()}
        self.said: list[tuple[str, str, str]] = []
        self.life: list[str] = []

    @contextmanager
    def start(self, system: str) -> Iterator[Engines]:
        if self.fails.get(system) == "started":
            raise DemoError("prefill ended with exit status 1:")
        roles = ("first",) if system == PLAIN else ("first", "second", "router")
        first, *others = (cast(Engine, StandIn(self, system, role)) for role in roles)
        self.life.append(f"+{system}")
        try:
            yield Engines(first, *(others or (None, None)))
        finally:
            self.life.append(f"-{system}")

    def run(self, *names: str, rounds: int = 2) -> Runner:
        plan = Plan(rounds=rounds, prompt_bytes=300, settle_s=0.0)
        runner = Runner(plan, TEXT, self.start, lambda name: f"OSError: {name} is broken", lambda line: None)
        runner.run(names)
        return runner


def test_each_figure_is_taken_of_the_engine_it_is_about() -> None:
    cluster = Cluster()
    runner = cluster.run("ours-tcp", "mooncake-store", "nixl", rounds=1)
    assert runner.left_out == {}
    of_ours = [said[1:] for said in cluster.said if said[0] == "ours-tcp" and said[2] != "Warming"]
    assert of_ours[:4] == [
        ("first", "Document"),
        ("second", "Document"),
        ("first", "reset"),
        ("first", "Document"),
    ]
    assert set(of_ours[4:6]) == {("first", "Story"), ("first", "Appendix")}
    assert of_ours[6:] == [("first", "reset"), ("second", "reset"), ("router", "Leaflet")]
    figures = {(one.system, one.figure): one for one in runner.samples}
    assert {name for name, figure in figures if figure == SPLIT} == {PLAIN, "ours-tcp", "nixl"}
    assert {name for name, figure in figures if figure == OTHER} == {"ours-tcp", "mooncake-store"}
    assert (PLAIN, CACHED) in figures and ("mooncake-store", BESIDE) in figures
    assert figures["ours-tcp", OTHER].loaded_tokens == 96
    assert figures["ours-tcp", STREAM].ms == pytest.approx(4.0)
    assert figures["ours-tcp", COLD].ms == 10.0
    answers = [identical(runner.samples, name).answers for name in ("ours-tcp", "mooncake-store", "nixl")]
    assert answers == [6, 5, 1]


def test_two_systems_are_up_at_a_time_and_engines_go_on_where_they_can() -> None:
    cluster = Cluster()
    runner = cluster.run("ours-tcp", "mooncake-store", "nixl", "mooncake", "ours-shm", "lmcache")
    assert runner.left_out == {}
    up: set[str] = set()
    for change in cluster.life:
        (up.add if change[0] == "+" else up.remove)(change[1:])
        assert len(up) <= 3
    assert not up
    assert len(cluster.life) == 2 * 7  # nobody is started twice


def test_rounds_of_different_phases_are_different_rounds() -> None:
    samples = Cluster().run("ours-tcp", "ours-shm").samples
    rounds = {name: {one.round for one in samples if one.system == name} for name in ("ours-tcp", "ours-shm")}
    assert not rounds["ours-tcp"] & rounds["ours-shm"]
    assert {one.round for one in samples if one.system == PLAIN} == rounds["ours-tcp"] | rounds["ours-shm"]


def test_every_system_has_its_phase_and_only_the_chosen_are_measured() -> None:
    assert {name for phase in PHASES for name in phase.systems} | {PLAIN} == set(SYSTEMS)
    assert all(SYSTEMS[name].pd_protocol for phase in PHASES if phase.is_split for name in phase.systems)
    assert phases(SYSTEMS) == list(PHASES)
    assert [phase.systems for phase in phases(["nixl", "ours-shm"])] == [("nixl",), ("ours-shm",)]
    # Nobody takes turns with nobody when there is another to take turns with.
    assert [phase.systems for phase in phases(["ours-tcp"])] == [("ours-tcp",)] * 2
    for_nixl, for_mooncake = phases(["ours-tcp", "nixl"]), phases(["ours-tcp", "mooncake"])
    assert [phase.systems for phase in for_nixl] == [("ours-tcp",), ("ours-tcp", "nixl")]
    assert [phase.systems for phase in for_mooncake] == [("ours-tcp",), ("ours-tcp", "mooncake")]


def test_who_fails_is_left_out_with_a_reason_and_the_others_go_on() -> None:
    cluster = Cluster(mooncake_store="started", lmcache="asked")
    runner = cluster.run("ours-tcp", "mooncake-store", "ours-shm", "lmcache")
    assert runner.left_out == {
        "mooncake-store": "OSError: mooncake-store is broken",
        "lmcache": "OSError: lmcache is broken",
    }
    rounds = [one.round for one in runner.samples if one.system == "ours-shm" and one.figure == COLD]
    assert len(rounds) == 2
    assert {change[1:] for change in cluster.life} == {PLAIN, "ours-tcp", "ours-shm", "lmcache"}
    assert len(cluster.life) == 2 * 4


def test_nobody_measures_plain_vllm_alone() -> None:
    runner = Cluster(offloading="started").run("offloading")
    assert runner.samples == [] and list(runner.left_out) == ["offloading"]


def test_without_plain_vllm_there_is_nothing_to_compare_with() -> None:
    cluster = Cluster(plain="asked")
    with pytest.raises(DemoError, match="answered 500"):
        cluster.run("ours-tcp")
    assert sorted(cluster.life) == ["+ours-tcp", "+plain", "-ours-tcp", "-plain"]


def test_engines_that_do_not_fit_into_memory_are_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines.available_bytes() > 1 << 20
    monkeypatch.setattr(engines, "available_bytes", lambda: 1 << 30)
    system = SYSTEMS[PLAIN]._replace(settings=lambda site: pytest.fail("started"))
    with (
        pytest.raises(DemoError, match=r"2 engine\(s\) take 2.9 GiB of memory, and 1.0 GiB are available"),
        engines.started(system, tmp_path, tmp_path / "system", two=True),
    ):
        pass
