"""The policy benchmark without its engines: what is asked of whom, and what it is summed up to."""

from pathlib import Path

import pytest
from demo_lib.processes import Processes
from policiesbench.cluster import LOCAL, POLICIES, SHARED, Cluster
from policiesbench.runner import order
from policiesbench.workload import Plan, Sample, prompts, summed_up

from router.kv_events.source import parse_store_source

PLAN = Plan(documents=3, questions=4, document_bytes=500)
TEXTS = ["A text of its own. " * 80, "Another one, as long. " * 80]


def test_policies_are_asked_the_same_at_the_same_times_but_share_no_prefix() -> None:
    one, other = (prompts(PLAN, TEXTS, 0, 2.0, salt) for salt in ("0001-0", "0002-0"))
    assert len(one) == PLAN.documents * PLAN.questions
    assert [prompt.at_s for prompt in one] == [prompt.at_s for prompt in other]
    assert [prompt.text.replace("0001-0", "0002-0") for prompt in one] == [prompt.text for prompt in other]
    assert not {prompt.text[:20] for prompt in one} & {prompt.text[:20] for prompt in other}
    assert [prompt.at_s for prompt in one] != [
        prompt.at_s for prompt in prompts(PLAN, TEXTS, 1, 2.0, "0001-1")
    ]


def test_questions_about_one_document_share_it_and_nothing_else() -> None:
    texts = [prompt.text for prompt in prompts(PLAN, TEXTS, 0, 2.0, "0001-0")]
    documents = {text.partition("\n\n")[0] for text in texts}
    assert len(documents) == PLAN.documents and len(set(texts)) == len(texts)
    assert len({document[:20] for document in documents}) == PLAN.documents


def test_every_round_has_each_policy_of_each_setup_once_and_another_begins() -> None:
    cells = {(setup, policy) for setup, policies in POLICIES.items() for policy in policies}
    rounds = [list(order(number)) for number in range(3)]
    assert all(set(one) == cells and len(one) == len(cells) for one in rounds)
    assert len({one[0] for one in rounds}) == 3


def test_only_the_setup_with_a_store_hears_of_it_and_takes_it_for_another_host(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        cluster = Cluster(processes, tmp_path / "model", Path("/run/sockets"))
    local, shared = (cluster.router_flags(setup, "random", tmp_path / "r.toml") for setup in (LOCAL, SHARED))
    assert "--store-kv-events" not in local
    source = parse_store_source(shared[shared.index("--store-kv-events") + 1])
    assert source.host == ""
    urls = {engine.url for engines in cluster.engines.values() for engine in engines}
    assert len(urls) == 4
    assert [word for word in local if word in urls] == [engine.url for engine in cluster.engines[LOCAL]]


def test_a_turn_is_summed_up() -> None:
    samples = [Sample(100.0 * number, 1000) for number in range(1, 11)]
    turn = summed_up(SHARED, "random", 2, samples, 4000.0, 1000.0)
    assert turn.requests == 10 and turn.round == 2
    assert turn.mean_ttft_ms == pytest.approx(550.0)
    assert turn.p90_ttft_ms == 1000.0
    assert (turn.hit_rate, turn.store_rate) == (0.4, 0.1)
