"""What other clients do to engines is seen by asking the engines."""

from tests.integration.router_harness import async_test, running, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": [1, 2, 3]}


def busy(running_requests: int) -> bytes:
    return b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n" % running_requests


@async_test
async def test_foreign_requests_count_as_load() -> None:
    async with running(mixed=2, policy="least_loaded", load={"interval_ms": 10}) as setup:
        setup.engines["m0"].metrics = busy(7)
        book = setup.router.cluster.book
        await until(lambda: max(i.foreign_requests for i in book.view(0.0).mixed) == 7)
        for _ in range(4):
            assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "m1"
        setup.engines["m0"].metrics, setup.engines["m1"].metrics = busy(0), busy(9)
        await until(lambda: [i.foreign_requests for i in book.view(0.0).mixed] == [0, 9])
        assert (await setup.ask(COMPLETIONS, PROMPT)).json["served_by"] == "m0"


@async_test
async def test_engines_without_metrics_are_served_all_the_same() -> None:
    async with running(mixed=2, policy="least_loaded", load={"interval_ms": 10}) as setup:
        answers = [await setup.ask(COMPLETIONS, PROMPT) for _ in range(4)]
        assert {answer.json["served_by"] for answer in answers} == {"m0", "m1"}


@async_test
async def test_nobody_is_asked_when_nothing_goes_by_load() -> None:
    async with running(mixed=1) as setup:
        assert not setup.router.config.asks_loads
        assert len(setup.router._loads._tasks) == 0
