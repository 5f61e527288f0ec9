"""The policy benchmark without its engines: what is asked of whom."""

from collections import Counter
from pathlib import Path

import pytest
from demo_lib.processes import Processes
from policiesbench.cells import LAYOUTS, LAYOUTS_PLAN, LOCAL, PAPER, SHARED, SPLIT, STORE_FOR_ALL, Cell, order
from policiesbench.cluster import Cluster, Model
from policiesbench.workload import Plan, prompts

from router.kv_events.source import parse_store_source

PLAN = Plan(requests=60, documents=4, document_bytes=500)
TEXTS = ["A text of its own. " * 80, "Another one, as long. " * 80]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cells = (*PAPER, *LAYOUTS)
    with Processes(tmp_path) as processes:
        return Cluster(processes, Model(tmp_path / "model", 4.0), PLAN, cells, Path("/run/sockets"))


def test_everybody_is_asked_the_same_at_the_same_times_but_shares_no_prefix() -> None:
    one, other = (prompts(PLAN, TEXTS, 0, 2.0, salt) for salt in ("0001-00", "0002-00"))
    assert len(one) == PLAN.requests
    assert [prompt.at_s for prompt in one] == [prompt.at_s for prompt in other]
    assert [prompt.text.replace("0001-00", "0002-00") for prompt in one] == [prompt.text for prompt in other]
    assert not {prompt.text[:20] for prompt in one} & {prompt.text[:20] for prompt in other}
    assert [prompt.at_s for prompt in one] != [
        prompt.at_s for prompt in prompts(PLAN, TEXTS, 1, 2.0, "0001-01")
    ]


def test_no_prompt_comes_twice_and_the_first_documents_are_asked_about_most() -> None:
    texts = [prompt.text for prompt in prompts(PLAN, TEXTS, 0, 2.0, "0001-00")]
    assert len(set(texts)) == len(texts)
    asked = Counter(text.partition("\n\n")[0][:20] for text in texts)
    assert len(asked) == PLAN.documents
    assert asked.most_common(1)[0][0].endswith("-0. ")
    assert asked["Document 0001-00-0. "] > 2 * asked["Document 0001-00-3. "]


def test_arrivals_come_at_the_rate_asked_for() -> None:
    plan = Plan(requests=2000, document_bytes=100)
    assert prompts(plan, TEXTS, 0, 4.0, "0001-00")[-1].at_s == pytest.approx(2000 / 4, rel=0.1)


def test_every_round_has_each_cell_once_and_another_begins() -> None:
    cells = (*PAPER, *STORE_FOR_ALL)
    rounds = [order(cells, number) for number in range(len(cells))]
    assert all(set(one) == set(cells) and len(one) == len(cells) for one in rounds)
    assert len({one[0] for one in rounds}) == len(cells)


def test_only_cells_with_a_store_hear_of_it_and_take_it_for_another_host(
    cluster: Cluster, tmp_path: Path
) -> None:
    local, shared = (cluster.router_flags(cell, tmp_path / "r.toml") for cell in (PAPER[0], PAPER[3]))
    assert "--store-kv-events" not in local
    source = parse_store_source(shared[shared.index("--store-kv-events") + 1])
    assert source.host == ""
    urls = {engine.url for engines in cluster.engines.values() for engine in engines}
    assert len(urls) == 4
    assert [word for word in local if word in urls] == [engine.url for engine in cluster.engines[LOCAL]]


def test_the_split_layout_has_the_same_engines_and_policy_as_the_mixed_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    mixed, split = (cluster.router_flags(cell, tmp_path / "r.toml") for cell in LAYOUTS)
    first, second = (engine.url for engine in cluster.engines[SHARED])
    assert mixed[mixed.index("--worker-urls") + 1 :][:2] == [first, second]
    assert split[split.index("--prefill") + 1] == first
    assert split[split.index("--decode") + 1] == second
    assert {flags[flags.index("--policy") + 1] for flags in (mixed, split)} == {"global_cache_aware"}


def test_engines_are_started_only_for_cells_that_use_them(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        cluster = Cluster(processes, Model(tmp_path, 4.0), LAYOUTS_PLAN, LAYOUTS, tmp_path)
    assert list(cluster.engines) == [SHARED]
    assert len({cluster.router_url(cell) for cell in LAYOUTS}) == 2
    assert Cell(SHARED, SPLIT) in LAYOUTS
