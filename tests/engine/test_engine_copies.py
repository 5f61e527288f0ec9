"""What one engine computed is copied from its store to another, and the engine there takes it for its own."""

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import metrics
from kvcore.client.sync_client import StoreClient
from kvcore.wire.messages import Status
from tests.engine.rig import MAX_TOKENS, EngineHost, StoreProcess, cached_of, tokens_of, transfer_config
from tests.engine.test_engine_reuse import FULL, PROMPTS, REQUESTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_an_engine_finds_in_its_store_what_was_copied_from_anothers(
    host: EngineHost,
    peer: EngineHost,
    store: StoreProcess,
    tmp_path_factory: pytest.TempPathFactory,
    engine_kwargs: dict[str, Any],
    plain_tokens: Callable[..., list[list[int]]],
) -> None:
    engine = {**engine_kwargs, "dtype": "float32"}
    truth = plain_tokens(PROMPTS, MAX_TOKENS, dtype="float32")
    near = StoreProcess(tmp_path_factory.mktemp("near"))
    try:
        assert host.call("start", engine=engine, transfer=transfer_config(store))["reason"] == ""
        assert tokens_of(host.call("generate", requests=REQUESTS)) == truth
        assert host.call("settle")["drained"]
        assert peer.call("start", engine=engine, transfer=transfer_config(near))["reason"] == ""
        with StoreClient.connect(store.address) as there, StoreClient.connect(near.address) as here:
            infos, _ = there.list_keys()
            keys = [info.key for info in infos]
            assert keys
            statuses = here.copy_from(keys, store.address, wait_ms=60_000)
            assert statuses == [Status.OK] * len(keys)
        answer = peer.call("generate", requests=REQUESTS)
        assert tokens_of(answer) == truth
        assert cached_of(answer) == FULL
        assert metrics.LOAD_FAILED_BLOCKS_TOTAL not in peer.call("settle")["totals"]
    finally:
        near.close()
