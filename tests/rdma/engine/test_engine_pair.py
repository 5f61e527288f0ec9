"""A prefill and a decode engine of vLLM that hand KV over through soft-RoCE."""

from typing import Any, NamedTuple

import pytest

from tests.engine.rig import (
    BLOCK_TOKENS,
    DOCUMENT,
    EngineHost,
    cached_of,
    pd_params,
    request,
    tokens_of,
)
from tests.rdma.engine.conftest import START_S
from tests.rdma.guest import Faults

pytestmark = [pytest.mark.rdma, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2 * START_S)]

PROMPT, OTHER_PROMPT = DOCUMENT[:1700], DOCUMENT[11:1200]


class Pair(NamedTuple):
    """`truth`: what an engine without us answers to both prompts."""

    prefill: EngineHost
    decode: EngineHost
    truth: list[list[int]]

    def ask(self, prompt: list[int], name: str) -> dict[str, Any]:
        """Both legs of a request at once; the decode engine's answer."""
        self.decode.send("generate", requests=[request(prompt, params=pd_params("decode", name))])
        self.prefill.send("generate", requests=[request(prompt, 1, pd_params("prefill", name))])
        self.prefill.receive()
        return self.decode.receive()

    def counters(self) -> list[dict[str, Any]]:
        """Of both engines' clients of the store, when all that was saved is there."""
        for engine in (self.prefill, self.decode):
            assert engine.call("settle")["drained"]
        return [engine.call("store_counters") for engine in (self.prefill, self.decode)]


@pytest.fixture(scope="module")
def pair(hosts: tuple[EngineHost, EngineHost], settings: dict[str, Any], transfer: dict[str, Any]) -> Pair:
    prefill, decode = hosts
    prefill.send("start", engine=settings, transfer=transfer)
    decode.send("start", engine=settings, transfer=None)
    for host in hosts:
        host.receive(START_S)
    plain = decode.call("generate", requests=[request(PROMPT), request(OTHER_PROMPT)])
    decode.call("start", engine=settings, transfer=transfer)
    return Pair(prefill, decode, tokens_of(plain))


def whole_blocks(prompt: list[int]) -> int:
    """Tokens in those that the decode engine takes over: all but the last, partial one."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_decode_engine_takes_all_kv_over_by_rdma(pair: Pair) -> None:
    answer = pair.ask(PROMPT, "first")
    assert tokens_of(answer) == [pair.truth[0]]
    assert cached_of(answer) == [whole_blocks(PROMPT)]
    saved_bytes = pair.prefill.call("settle")["totals"]["saved_bytes_total"]
    for counters in pair.counters():
        assert counters["plane"] == "rdma", counters
        # A layer whose answer is late, in a busy guest, is read again.
        assert counters["rdma_moved_bytes_total"] >= saved_bytes > 0, counters
        assert counters["rdma_inline_keys_total"] == 0, counters


def test_without_a_wire_the_pair_goes_on_and_its_tokens_are_right(pair: Pair, faults: Faults) -> None:
    before = pair.counters()
    faults.down("rh0", "rh2")
    answer = pair.ask(OTHER_PROMPT, "second")
    assert tokens_of(answer) == [pair.truth[1]]
    assert cached_of(answer) == [whole_blocks(OTHER_PROMPT)]
    for old, new in zip(before, pair.counters(), strict=True):
        assert new["rdma_inline_keys_total"] > 0
        assert new["rdma_moved_bytes_total"] == old["rdma_moved_bytes_total"]
