"""The router's core beside a peer's: what counts as right, what a ratio is. No figure is asserted."""

import sys
from collections.abc import Sequence
from pathlib import Path

from corebench.behaviours import BEHAVIOURS, try_all
from corebench.figures import Figure
from corebench.inputs import WORKERS, growing_chains, inputs
from corebench.report import ratio
from corebench.runner import Budget, Runner
from corebench.systems import OURS, SYSTEMS, Subject, System
from storebench.processes import SystemFailed

from kvcore.wire.events import decode_batch
from router.core.prefix_index import PrefixIndex

TINY = Budget(rounds=2, memory_blocks=8192, batches=((1, 8), (8, 8)), min_s=0.001)
# Ours, but for one thing: what was lost in a gap is not forgotten.
STUBBORN = """
from corebench.ours import Ours
from corebench.serving import serve
from router.core.event_feed import EventFeed

EventFeed._forget = lambda self: None
serve(Ours)
"""


def test_a_ratio_compares_within_rounds_and_is_below_one_where_ours_needs_less() -> None:
    # The machine is ten times slower in the last round, for both.
    figures = [
        *(Figure("hash", "ours", n, value, "us") for n, value in enumerate((30.0, 40.0, 400.0))),
        *(Figure("hash", "peer", n, value, "us") for n, value in enumerate((60.0, 80.0, 500.0))),
        *(Figure("events", "ours", n, 100.0, "batches/s") for n in range(3)),
        Figure("events", "peer", 1, 400.0, "batches/s"),
    ]
    assert ratio(figures, "hash", "ours", "peer") == 0.5
    assert ratio(figures, "events", "ours", "peer") == 4.0
    assert ratio(figures, "hash", "ours", "other") is None


def test_inputs_are_the_same_each_time_and_events_are_what_engines_publish() -> None:
    assert inputs() == inputs() != inputs(seed=2)
    assert all(len(depths) == WORKERS for depths in inputs().depths.values())
    batches = [decode_batch(payload) for payload in growing_chains(1, 8, 100)]
    assert not any(batch.num_skipped for batch in batches)
    index = PrefixIndex(16)
    worker = index.add_worker("w")
    for batch in batches:
        index.apply(worker, batch.events)
    assert index.stats.stored == 800 and index.stats.removed == 200 and index.table.num_blocks == 600


def ours() -> System:
    return next(system for system in SYSTEMS if system.name == OURS)


def broken() -> tuple[str, Sequence[Path]]:
    raise SystemFailed("cannot be installed")


def test_ours_is_right_about_everything(tmp_path: Path) -> None:
    subject = Subject(ours(), tmp_path / "log")
    try:
        outcomes = try_all(subject)
    finally:
        subject.close()
    assert [outcome.behaviour for outcome in outcomes] == [behaviour.name for behaviour in BEHAVIOURS]
    assert [outcome for outcome in outcomes if not outcome.is_right] == []


def test_who_believes_in_blocks_that_may_be_gone_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    folders = [*ours().command()[1], tmp_path]
    stubborn = System("stubborn", "", "stubborn", lambda: (sys.executable, folders))
    subject = Subject(stubborn, tmp_path / "log")
    try:
        wrong = [outcome for outcome in try_all(subject) if not outcome.is_right]
    finally:
        subject.close()
    assert [outcome.behaviour for outcome in wrong] == ["a batch is lost and nobody can replay it"]
    assert wrong[0].detail == "believes in 4 blocks, right is 0"


def test_everything_is_measured_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    dying = System("dying", "", "no_such_module", ours().command)
    runner = Runner([ours(), System("broken", "", "", broken), dying], tmp_path, lambda text: None)
    runner.run(TINY)
    assert runner.failed.keys() == {"broken", "dying"}
    assert "cannot be installed" in runner.failed["broken"]
    assert "no_such_module" in runner.failed["dying"]
    rounds: dict[str, list[int]] = {}
    for figure in runner.figures:
        assert figure.system == OURS and figure.value > 0
        rounds.setdefault(figure.name, []).append(figure.round)
    assert rounds.pop("memory, 8,192 blocks") == [0]
    assert set(map(tuple, rounds.values())) == {(0, 1)}
    assert {"hash", "choose, token ids", "choose, hashes", "choose and book"} <= rounds.keys()
    assert {"events, batches of 1 block", "events, batches of 8 blocks"} <= rounds.keys()
