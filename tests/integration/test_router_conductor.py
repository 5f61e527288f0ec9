"""Other routers ask ours as they would ask Mooncake's Conductor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from router.core.conductor_index import standard_hashes
from tests.integration.event_publisher import EventPublisher, stored
from tests.integration.router_harness import Answer, Setup, async_test, running, until

TOKENS = list(range(64))
HASHES = [101, 102, 103, 104]
QUERY = {"model": "deepseek", "token_ids": TOKENS, "block_size": 16}


def registration(publisher: EventPublisher, **changes: Any) -> dict[str, Any]:
    return {
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "type": "vLLM",
        "modelname": "deepseek",
        "lora_name": None,
        "tenant_id": "default",
        "instance_id": "vllm-prefill-node1",
        "block_size": 16,
        "dp_rank": 0,
        "additionalsalt": "",
        **changes,
    }


@contextmanager
def publishing() -> Iterator[EventPublisher]:
    publisher = EventPublisher()
    try:
        yield publisher
    finally:
        publisher.close()


async def until_matched(setup: Setup, tokens: int) -> Answer:
    while True:
        answer = await setup.ask("/query", QUERY)
        assert answer.status == 200
        found = answer.json["default"]
        if found and found["vllm-prefill-node1"]["longest_matched"] == tokens:
            return answer


@async_test
async def test_register_query_unregister() -> None:
    with publishing() as publisher:
        publisher.publish([stored(HASHES[:2], TOKENS[:32])])
        await check_register_query_unregister(publisher)


async def check_register_query_unregister(publisher: EventPublisher) -> None:
    async with running(mixed=1) as setup:
        assert (await setup.ask("/query", QUERY)).json == {"default": {}}
        for _ in range(2):  # again is as good as once
            registered = await setup.ask("/register", registration(publisher))
            assert registered.json == {
                "status": "registered successfully",
                "instance_id": "vllm-prefill-node1",
            }
        await until(publisher.is_heard)
        publisher.publish([stored(HASHES[2:3], TOKENS[32:48], parent=HASHES[1])])
        answer = await until_matched(setup, 48)
        assert answer.json == {
            "default": {
                "vllm-prefill-node1": {
                    "longest_matched": 48,
                    "GPU": 48,
                    "CPU": 0,
                    "DISK": 0,
                    "DP": {"0": 48},
                }
            }
        }
        by_hash = {"model": "deepseek", "block_size": 16, "seq_hashes": standard_hashes(TOKENS, 16)}
        assert (await setup.ask("/query_by_hash", by_hash)).json == answer.json
        by_hash["block_hash"] = by_hash.pop("seq_hashes")
        assert (await setup.ask("/query_by_hash", by_hash)).json == answer.json
        other = await setup.ask("/query", {**QUERY, "instance_id": "another"})
        assert other.json == {"default": {}}
        gone = await setup.ask("/unregister", {"instance_id": "vllm-prefill-node1", "dp_rank": 0})
        assert gone.json == {
            "status": "unregistered successfully",
            "removed_instances": ["vllm-prefill-node1|default|0"],
        }
        assert (await setup.ask("/query", QUERY)).json == {"default": {}}
        assert (await setup.ask("/unregister", {"instance_id": "x", "dp_rank": 0})).status == 404


@async_test
async def test_mistakes_are_named() -> None:
    with publishing() as publisher:
        await check_mistakes(publisher)


async def check_mistakes(publisher: EventPublisher) -> None:
    async with running(mixed=1) as setup:
        for path, body, complaint in (
            ("/register", registration(publisher, endpoint="nowhere"), "tcp://HOST:PORT"),
            ("/register", registration(publisher, block_size=0), "block_size"),
            ("/register", {"endpoint": publisher.endpoint}, "missing required field"),
            ("/query", {**QUERY, "token_ids": [-1]}, "numbers from 0"),
            ("/query", {**QUERY, "block_size": "16"}, "block_size"),
            ("/query_by_hash", {"model": "m", "block_size": 16}, "seq_hashes is missing"),
            ("/query", b"not json", "/query:"),
        ):
            answer = await setup.ask(path, body)
            assert answer.status == 400 and complaint in answer.json["error"]["message"]
        assert (await setup.ask("/query", method="GET")).status == 405
        assert setup.router.conductor.num_publishers == 0


@async_test
async def test_with_keys_it_is_for_those_who_have_one() -> None:
    async with running(mixed=1, api_keys=["secret"]) as setup:
        assert (await setup.ask("/query", QUERY)).status == 401
        assert (await setup.ask("/query", QUERY, "authorization: Bearer secret\r\n")).status == 200
