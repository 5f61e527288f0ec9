"""Ranks of data parallel engines as instances of their own."""

from router.instance_spec import InstanceSpec
from tests.integration.router_harness import async_test, running, until

COMPLETIONS = "/v1/completions"
PROMPT = {"model": "m", "prompt": "Once upon a time"}
RANK = "x-data-parallel-rank"


@async_test
async def test_ranks_take_turns_and_engines_are_told_which() -> None:
    async with running(mixed=1, data_parallel_size=3) as setup:
        assert len(setup.router.cluster.instances) == 3
        for _ in range(6):
            assert (await setup.ask(COMPLETIONS, PROMPT)).status == 200
        seen = setup.engines["m0"].seen
        assert sorted(one.headers[RANK] for one in seen) == ["0", "0", "1", "1", "2", "2"]
        assert all(one.headers["x-override-routed-dp-rank"] == one.headers[RANK] for one in seen)
        listed = (await setup.ask("/ready")).json["instances"]
        assert set(listed) == {f"{setup.engines['m0'].url}@{rank}" for rank in range(3)}


@async_test
async def test_a_client_that_names_a_rank_gets_it() -> None:
    async with running(mixed=2, data_parallel_size=2) as setup:
        for _ in range(4):
            assert (await setup.ask(COMPLETIONS, PROMPT, f"{RANK}: 1\r\n")).status == 200
        for engine in setup.engines.values():
            assert [one.headers[RANK] for one in engine.seen] == ["1", "1"]
        wrong = await setup.ask(COMPLETIONS, PROMPT, f"{RANK}: 2\r\n")
        assert wrong.status == 400 and "none of the 2 ranks" in wrong.json["error"]["message"]


@async_test
async def test_without_ranks_to_choose_from_a_clients_header_passes() -> None:
    async with running(mixed=1) as setup:
        await setup.ask(COMPLETIONS, PROMPT, f"{RANK}: 5\r\n")
        await setup.ask(COMPLETIONS, PROMPT)
        first, second = setup.engines["m0"].seen
        assert first.headers[RANK] == "5" and RANK not in second.headers


@async_test
async def test_the_room_of_sglang_reaches_the_prefill_rank() -> None:
    async with running(prefill=1, decode=1, data_parallel_size=4, pd_protocol="sglang") as setup:
        for _ in range(4):
            await setup.ask(COMPLETIONS, PROMPT)
        await until(lambda: len(setup.engines["p0"].seen) == 4)
        ranks = [int(one.headers[RANK]) for one in setup.engines["p0"].seen]
        rooms = [one.body["bootstrap_room"] for one in setup.engines["p0"].seen]
        assert sorted(ranks) == [0, 1, 2, 3] and [room % 4 for room in rooms] == ranks


@async_test
async def test_each_rank_has_its_own_load() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {load}\n'
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="m"}} 0\n'
        for rank, load in enumerate((9, 0))
    )
    async with running(
        mixed=1, data_parallel_size=2, policy="least_loaded", load={"interval_ms": 10}
    ) as setup:
        setup.engines["m0"].metrics = text.encode()

        def loads() -> list[int]:
            return [state.load for state in setup.router.cluster.book.view(0.0).mixed]

        await until(lambda: loads() == [9, 0])
        await setup.ask(COMPLETIONS, PROMPT)
        assert setup.engines["m0"].seen[0].headers[RANK] == "1"


@async_test
async def test_ranks_that_were_discovered_are_counted_by_what_is_there() -> None:
    async with running(prefill=1, decode=1, pd_protocol="sglang") as setup:
        cluster, ranks, num_asked = setup.router.cluster, 3, 0
        cluster.apply(
            InstanceSpec(one.spec.base_url, one.role, rank)
            for one in list(cluster.instances.values())
            for rank in range(ranks)
        )
        for rank in range(ranks):
            for _ in range(4):
                answer = await setup.ask(COMPLETIONS, PROMPT, f"x-data-parallel-rank: {rank}\r\n")
                assert answer.status == 200
                num_asked += 1
                await until(lambda: len(setup.engines["p0"].seen) == num_asked)  # noqa: B023
                prefill, decode = (setup.engines[name].seen[-1] for name in ("p0", "d0"))
                assert prefill.headers["x-override-routed-dp-rank"] == str(rank)
                assert decode.body["bootstrap_room"] % ranks == rank
        assert (await setup.ask(COMPLETIONS, PROMPT, "x-data-parallel-rank: 3\r\n")).status == 400
