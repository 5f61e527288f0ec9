"""configs/grafana: what its dashboard asks Prometheus for is what router and store export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.router_harness import async_test, running
from tests.integration.store_harness import StartStore, short_dir, start_store

__all__ = ["short_dir", "start_store"]

DASHBOARD = json.loads((Path(__file__).resolve().parents[2] / "configs/grafana/mooncake.json").read_text())
_METRIC = re.compile(r"\b(?:mooncake_|process_)\w+")
_LABELS = re.compile(r"\b(mooncake_\w+)\{([^}]*)\}")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def exported(text: str) -> dict[str, set[str]]:
    """Names of series by the text format, with the labels of each; a family may have no series yet."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            for suffix in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
                found.setdefault(name + suffix, set())
        elif not line.startswith("#"):
            name, _, labels = line.partition(" ")[0].partition("{")
            found.setdefault(name, set()).update(re.findall(r"(\w+)=\"", labels))
    return found


def test_every_metric_it_asks_for_is_exported(start_store: StartStore, short_dir: Path) -> None:
    store = start_store(
        "--storage-levels",
        json.dumps([{"level": "ssd", "paths": [str(short_dir / "ssd")], "capacity": "64mb"}]),
    )
    found = exported(router_metrics()) | exported(store.http("/metrics"))
    asked = {name for expression in expressions() for name in _METRIC.findall(expression)}
    assert len(asked) > 50
    assert asked - found.keys() == set()


def router_metrics() -> str:
    """Of a router that has done a bit of everything."""
    texts: list[str] = []

    @async_test
    async def ask() -> None:
        async with running(mixed=1, policy="global_cache_aware") as setup:
            prompt = {"model": "m", "prompt": list(range(64)), "max_tokens": 4, "stream": True}
            await setup.ask("/v1/completions", prompt, "x-slo-ttft-ms: 60000\r\n")
            texts.append((await setup.ask("/metrics")).body.decode())

    ask()
    return texts[0]


def test_labels_it_selects_and_groups_by_exist() -> None:
    found = exported(router_metrics())
    for panel in panels():
        for target in panel["targets"]:
            names = [name for name in _METRIC.findall(target["expr"]) if name.startswith("mooncake_router_")]
            labels = {label for name in names for label in found[name]} | {"job", "instance"}
            for name, selector in _LABELS.findall(target["expr"]):
                asked = set(re.findall(r"(\w+)(?:=|!)", selector)) - {"job"}
                if found.get(name):
                    assert asked <= found[name], target["expr"]
            if names and all(found[name] for name in names):
                assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels, target
                for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
                    assert {label.strip() for label in group.split(",")} <= labels, target


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_each_panel_uses_the_chosen_source_and_jobs(panel: dict[str, Any]) -> None:
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert "$router" in target["expr"] or "$store" in target["expr"], target["expr"]
