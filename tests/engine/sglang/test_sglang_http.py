"""The life of the backend in one running SGLang: attached, used, watched, verified, detached."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from router.core.block_hash import block_hashes
from router.core.prefix_index import PrefixIndex
from router.core.view import NO_WORKER, InstanceState
from tests.engine.following import follow
from tests.engine.rig import ROOT, StoreProcess
from tests.engine.sglang.conftest import NewServer
from tests.engine.sglang.server import (
    ADMIN_KEY,
    FULL_PAGES,
    PAGE_TOKENS,
    PROMPT,
    SglangServer,
    hicache_flags,
    suite_config,
    wait_until,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

STORAGE = "/hicache/storage-backend"
OTHER_PROMPT = [4 + i * 41 % 250 for i in range(600)]


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Not tmp_path: the path of a Unix socket may have no more than 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="mks-") as name:
        yield Path(name)


def test_attach_use_watch_verify_update_detach(
    new_server: NewServer,
    tmp_path: Path,
    sockets: Path,
    sglang_model: str,
    make_model: Callable[..., str],
) -> None:
    events = {
        "publisher": "zmq",
        "endpoint": f"ipc://{sockets}/engine",
        "replay_endpoint": f"ipc://{sockets}/engine-replay",
        "bind": True,
    }
    server = new_server(
        *hicache_flags("page_first_direct", "direct"), "--kv-events-config", json.dumps(events)
    )
    flags = ("--events.endpoint", f"ipc://{sockets}/store", "--events.hash-forms", "sglang")
    store = StoreProcess(tmp_path, *flags, "--events.replay-endpoint", f"ipc://{sockets}/store-replay")
    try:
        # Without storage a flush loses everything.
        cold = server.generate(OTHER_PROMPT)
        server.flush()
        assert sum(server.generate(OTHER_PROMPT)["cached"][tier] for tier in ("device", "host")) == 0

        assert server.ask("GET", STORAGE, admin=False)[0] == 401
        server.ask_when_idle("PUT", STORAGE, attachment(store))
        assert '"dynamic"' in server.ask("GET", STORAGE)[1]
        first = server.generate(PROMPT)
        server.wait_saved()
        check_events(sockets)
        server.flush()
        check_restored(server.generate(PROMPT), first)
        check_metrics(server)
        check_verify(server)

        # Another use of the same backend after another: nothing of the first must be in the way.
        server.ask_when_idle("DELETE", STORAGE)
        server.flush()
        assert server.generate(PROMPT)["cached"]["storage"] == 0
        server.ask_when_idle("PUT", STORAGE, attachment(store, tenant="other"))
        server.flush()
        assert server.generate(PROMPT)["cached"]["storage"] == 0
        server.ask_when_idle("DELETE", STORAGE)
        server.ask_when_idle("PUT", STORAGE, attachment(store))
        server.flush()
        check_restored(server.generate(PROMPT), first)
        assert server.generate(OTHER_PROMPT)["tokens"] == cold["tokens"]
        check_weight_updates(server, store, sglang_model, make_model("--seed", "1"), first)
    finally:
        store.close()


def attachment(store: StoreProcess, **extra: Any) -> dict[str, Any]:
    return {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend_extra_config_json": json.dumps(suite_config(store, **extra)),
    }


def check_restored(restored: dict[str, Any], first: dict[str, Any]) -> None:
    assert restored["cached"]["storage"] == FULL_PAGES
    assert (restored["tokens"], restored["logprobs"]) == (first["tokens"], first["logprobs"])


def check_weight_updates(
    server: SglangServer, store: StoreProcess, model: str, other_model: str, first: dict[str, Any]
) -> None:
    """KV of weights that the engine no longer has is not found, and none is stored by their name."""

    def load(model_path: str) -> None:
        server.ask_when_idle("POST", "/update_weights_from_disk", {"model_path": model_path})

    load(other_model)
    second = server.generate(PROMPT)
    assert second["cached"]["storage"] == 0
    assert second["tokens"] != first["tokens"]
    server.flush()
    check_restored(server.generate(PROMPT), second)
    # A backend that begins now has nothing of what the engine was started with, either.
    server.ask_when_idle("DELETE", STORAGE)
    server.ask_when_idle("PUT", STORAGE, attachment(store))
    server.flush()
    check_restored(server.generate(PROMPT), second)
    load(model)
    check_restored(server.generate(PROMPT), first)
    # Weights that come from elsewhere have no name.
    for path in ("/begin_weight_update", "/end_weight_update"):
        assert server.ask("POST", path, {})[0] == 200
    server.flush()
    assert server.generate(PROMPT)["cached"]["storage"] == 0


def check_metrics(server: SglangServer) -> None:
    """What the backend counts comes out where SGLang's users look for it."""
    num_pages = FULL_PAGES // PAGE_TOKENS
    server.wait_metrics(
        lambda found: (
            found.get("sglang:storage_prefetch_hit_tokens_total") == FULL_PAGES
            and found.get("sglang:prefetch_pgs_sum") == num_pages
            and found.get("sglang:backup_pgs_sum", 0) >= num_pages
            and found.get("sglang:prefetch_bandwidth_sum", 0) > 0
            and found.get("sglang:backup_bandwidth_sum", 0) > 0
        )
    )


def check_events(sockets: Path) -> None:
    """One index follows both: the engine's events have token ids, the store's have hashes alone. Both publish
    when they have time."""
    seen = ""

    def agree() -> bool:
        nonlocal seen
        index = PrefixIndex(PAGE_TOKENS)
        engine_worker = follow(index, "engine", f"ipc://{sockets}/engine-replay")
        store_worker = follow(index, "store", f"ipc://{sockets}/store-replay")
        match = index.match(block_hashes(PROMPT, PAGE_TOKENS), 0.0)
        engine = InstanceState("engine", engine_worker, NO_WORKER)
        beside_store = InstanceState("empty, beside the store", NO_WORKER, store_worker)
        found = [match.local_blocks_of((instance,)) for instance in (engine, beside_store)]
        seen = f"{found}, {index.stats.unknown_hash} pages that only the store names"
        return index.stats.unknown_hash == 0 and found == [[FULL_PAGES // PAGE_TOKENS]] * 2

    wait_until(agree, lambda: seen)


def check_verify(server: SglangServer) -> None:
    """The command that users run, against a server of their own."""
    url = f"http://127.0.0.1:{server.port}"
    command = [sys.executable, "-m", "sglang_hicache_backend.verify", url, "--json", "--settle-s", "1"]
    # Without the key the flush is refused, which is no verdict on the store.
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "--admin-key" in refused.stderr
    done = subprocess.run(
        [*command, "--admin-key", ADMIN_KEY, "--tries", "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert (verdict["code"], verdict["logprob_difference"]) == ("passed", 0.0)
    assert verdict["hit_percent"] > 95
