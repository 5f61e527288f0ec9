"""Every metric that the documents name is one that store, router or connector export."""

import json
import re
from pathlib import Path

from kvcore import metrics
from tests.integration.store_harness import StartStore
from tests.integration.store_harness import short_dir as short_dir
from tests.integration.store_harness import start_store as start_store
from tests.integration.test_grafana import exported, router_metrics

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def test_metrics_in_the_documents_are_exported(start_store: StartStore, short_dir: Path) -> None:
    levels = [
        {"level": "ssd", "paths": [str(short_dir / "ssd")], "capacity": "64mb"},
        {"level": "remote", "url": f"file://{short_dir}/remote"},
    ]
    tenants = [{"name": "a", "token": "a"}]
    store = start_store("--storage-levels", json.dumps(levels), "--tenants", json.dumps(tenants))
    series = set(exported(router_metrics()) | exported(store.http("/metrics")))
    asked = {
        name
        for text in TEXTS.values()
        for name in re.findall(r"mooncake_(?:store|router)_\w*[a-z]\b(?![.{]*\.\.)", text)
    }
    assert len(asked) > 5
    assert asked <= series
    # Without the prefix, in the table of those to watch.
    table = TEXTS["operations.md"].partition("| metric (")[2].partition("\n\n")[0]
    named = {
        name
        for row in table.splitlines()[2:]
        for code in re.findall(r"`([^`]+)`", row.split("|")[1])
        for name in re.findall(r"[a-z]\w+", re.sub(r"\{.*", "", code))
    }
    assert len(named) > 12
    assert {metrics.STORE_PREFIX + name for name in named} <= series


def test_counters_in_the_documents_are_counted() -> None:
    """Of the connectors and clients too, which export them through their engine or not at all."""
    sources = "".join(
        path.read_text()
        for package in ("kvcore", "mooncake_connector", "store_server", "router")
        for path in sorted((ROOT / package).rglob("*.py"))
    )
    for document, text in TEXTS.items():
        for name in re.findall(r"`([a-z]\w+_total)\b", text):
            bare = re.sub(rf"^({metrics.STORE_PREFIX}|{metrics.ROUTER_PREFIX}|ssd_|remote_|rdma_)", "", name)
            is_ours = any(re.search(rf"\b{each}\"", sources) for each in (name, bare))
            assert is_ours or name.startswith("vllm_router_"), f"{document}: {name}"
