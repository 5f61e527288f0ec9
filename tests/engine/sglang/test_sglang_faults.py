"""What goes wrong with the store costs hits, never tokens and never a request."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvcore import metrics
from tests.engine.rig import StoreProcess
from tests.engine.sglang.conftest import NewServer
from tests.engine.sglang.server import PROMPT, SglangServer, hicache_flags, suite_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

PROMPTS = [[*PROMPT[i * 20 : i * 20 + 300], i + 4] for i in range(4)]
# SGLang's own: seconds before, and probability of failing, of each call to the backend.
FAULTS = {
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.5",
    "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
}


def all_at_once(server: SglangServer, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(server.generate, prompts))


def test_faults_cost_hits_and_never_tokens(new_server: NewServer, store: StoreProcess) -> None:
    flags = hicache_flags("page_first", "kernel", suite_config(store))
    # In float32: prompts that share a batch round differently, and no token may hang on that.
    server = new_server(*flags, "--dtype", "float32", environment=FAULTS)
    truth = [server.generate(prompt) for prompt in PROMPTS]
    assert all(answer["cached"]["storage"] == 0 for answer in truth)
    # Chance may let every call of a round fail.
    deadline = time.monotonic() + 240
    from_storage = 0
    while from_storage == 0:
        assert time.monotonic() < deadline, server.log_tail()
        server.flush()
        for prompt, wanted in zip(PROMPTS, truth, strict=True):
            answer = server.generate(prompt)
            assert (answer["tokens"], answer["logprobs"]) == (wanted["tokens"], wanted["logprobs"])
            from_storage += answer["cached"]["storage"]
    assert "failure_prob=0.3" in server.log.read_text(), "SGLang injects no faults"

    # The store dies after it has been asked what it has, and before or while it is asked for it.
    server.flush()
    lookups = store.stats()[metrics.LOOKUP_KEYS_TOTAL]
    killer = threading.Thread(target=kill_after_lookup, args=(store, lookups))
    killer.start()
    answers = all_at_once(server, PROMPTS)
    killer.join()
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in truth]

    # And without it from then on, with everything the engine can do by itself.
    answers = all_at_once(server, PROMPTS)
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in truth]
    server.flush()
    answer = server.generate(PROMPTS[0])
    assert (answer["tokens"], answer["cached"]["storage"]) == (truth[0]["tokens"], 0)

    # A store that comes back is used again.
    store.start()
    deadline = time.monotonic() + 120
    while answer["cached"]["storage"] == 0:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(1)
        server.flush()
        answer = server.generate(PROMPTS[0])
        assert answer["tokens"] == truth[0]["tokens"]


def kill_after_lookup(store: StoreProcess, lookups_before: int) -> None:
    deadline = time.monotonic() + 120
    while store.stats()[metrics.LOOKUP_KEYS_TOTAL] == lookups_before and time.monotonic() < deadline:
        time.sleep(0.01)
    store.kill()
