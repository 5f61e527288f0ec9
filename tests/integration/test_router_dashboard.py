"""The dashboard's page and its data over HTTP; a browser looks at it in test_router_dashboard_browser.py."""

import asyncio

from tests.integration.router_harness import Answer, Setup, async_test, dies, fails, running, until

COMPLETIONS = "/v1/completions"
SHARED = list(range(160))  # ten blocks
DATA = "/dashboard/data"


def prompt(number: int, *, stream: bool = True) -> dict[str, object]:
    return {"model": "m", "prompt": [*SHARED, *([1000 + number] * 16)], "max_tokens": 6, "stream": stream}


async def sampled(setup: Setup) -> None:
    """Until what happened so far is in the history: in the next row it gets."""
    seen = setup.router.watch.history.num_rows
    await until(lambda: setup.router.watch.history.num_rows > seen)


@async_test
async def test_the_page_and_its_files_are_served_with_a_strict_policy() -> None:
    async with running(mixed=1) as setup:
        page = await setup.ask("/dashboard")
        assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        names = [part.partition('"')[0] for part in page.body.decode().split('"/dashboard/static/')[1:]]
        assert len(names) >= 4
        for name in names:
            file = await setup.ask(f"/dashboard/static/{name}")
            assert file.status == 200 and file.body, name
            assert file.headers["x-content-type-options"] == "nosniff"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert b"http://" not in page.body and b"https://" not in page.body  # works without the internet


@async_test
async def test_other_paths_below_it_do_not_exist() -> None:
    async with running(mixed=1) as setup:
        for path in ("/dashboard/", "/dashboard/static/", "/dashboard/static/../pages.py", "/dashboard/x"):
            assert (await setup.ask(path)).status == 404, path
        assert (await setup.ask("/dashboard", method="POST")).status == 405


@async_test
async def test_the_data_is_for_those_with_a_key_and_the_page_for_all() -> None:
    async with running(mixed=1, api_keys=["secret"]) as setup:
        assert (await setup.ask("/dashboard")).status == 200
        assert (await setup.ask(DATA)).status == 401
        assert (await setup.ask(DATA, headers="authorization: Bearer secret\r\n")).status == 200


async def ask_all(setup: Setup, count: int, headers: str = "") -> list[Answer]:
    return [await setup.ask(COMPLETIONS, prompt(number), headers) for number in range(count)]


@async_test
async def test_data_tells_what_happened() -> None:
    scheduling = {"admission": "early", "ttft_slo_ms": 100_000.0, "tbt_slo_ms": 50_000.0}
    async with running(mixed=2, policy="global_cache_aware", scheduling=scheduling) as setup:
        await until(lambda: setup.router.watch.history.num_rows > 0)
        assert {answer.status for answer in await ask_all(setup, 8)} == {200}
        rejected = await setup.ask(COMPLETIONS, prompt(9), "x-slo-ttft-ms: 0.001\r\n")
        assert rejected.status == 429
        await sampled(setup)
        data = (await setup.ask(DATA)).json
        recent = data["recent"]
        assert recent["finished"] == 9 and recent["ttft_met_share"] == recent["tbt_met_share"] == 1.0
        assert 0 < recent["ttft_p50_ms"] <= recent["ttft_p95_ms"] and recent["tbt_p95_ms"] > 0
        # The second request on finds the ten shared blocks of its eleven.
        assert 0.5 < recent["hit_share"] < 1.0
        assert data["rejected_total"] == {"ttft_slo": 1}
        assert data["slo"] == {"ttft_ms": 100_000.0, "tbt_ms": 50_000.0}
        (hot,) = data["prefixes"]
        assert hot["tokens"] == 128 and hot["requests_per_min"] > 5 and len(hot["held_by"]) == 1
        newest = data["decisions"][0]
        assert newest["rejected"]["reason"] == "ttft_slo" and newest["num_candidates"] == 2
        assert {one["instance_id"] for one in newest["candidates"]["prefill"]} == {
            engine.url for engine in setup.engines.values()
        }
        assert [engine["state"] for engine in data["engines"]] == ["up", "up"]
        assert (
            data["verdict"][0]["level"] == "watch" and "1 request was rejected" in data["verdict"][0]["text"]
        )


@async_test
async def test_a_page_asks_only_for_what_is_new() -> None:
    async with running(mixed=1) as setup:
        await until(lambda: setup.router.watch.history.num_rows > 1)
        first = (await setup.ask(DATA)).json
        rows = len(first["history"]["unix_time_s"])
        assert rows == first["last_row"] > 1
        again = (await setup.ask(f"{DATA}?after={first['last_row']}")).json
        assert len(again["history"]["unix_time_s"]) == again["last_row"] - first["last_row"]
        for nonsense in ("x", "-1", "1e3", "9" * 40, ""):
            data = (await setup.ask(f"{DATA}?after={nonsense}")).json
            assert len(data["history"]["unix_time_s"]) == data["last_row"], nonsense


@async_test
async def test_streams_of_a_router_that_reads_no_prompts_are_measured_too() -> None:
    async with running(mixed=1) as setup:
        await ask_all(setup, 3, "x-slo-tpot-ms: 50000\r\n")
        metrics = setup.router.metrics
        assert sum(metrics.ttft.counts) == sum(metrics.tbt.counts) == 3
        assert metrics.slo_answers == {("tbt", "met"): 3}
        assert metrics.prompt_tokens == 0
        await setup.ask(COMPLETIONS, prompt(1, stream=False))
        assert sum(metrics.ttft.counts) == 3  # when its first token came nobody saw


@async_test
async def test_an_engine_that_fails_is_named() -> None:
    health = {"interval_ms": 50, "startup_interval_ms": 50, "failure_threshold": 1}
    async with running(mixed=2, health=health, breaker={"failure_threshold": 1}) as setup:
        await until(lambda: setup.router.cluster.is_ready())
        good, bad = setup.engines["m0"], setup.engines["m1"]
        bad.default = good.default = fails(500)
        bad.healthy = False
        await until(lambda: setup.router.watch.state_since(bad.url)[0] == "down")
        good.default = dies
        assert (await setup.ask(COMPLETIONS, prompt(1))).status >= 500
        await until(lambda: setup.router.watch.state_since(good.url)[0] == "breaker_open")
        data = (await setup.ask(DATA)).json
        told = [finding["text"] for finding in data["verdict"] if finding["level"] == "bad"]
        assert "No engine can answer: every request is refused." in told
        assert f"{bad.url} is down (status 500)." in told
        down = next(engine for engine in data["engines"] if engine["id"] == bad.url)
        assert down["state"] == "down" and down["detail"] == "status 500"
        assert down["since_unix_s"] <= data["unix_time_s"]


@async_test
async def test_watching_leaves_decisions_as_they_are() -> None:
    async with running(mixed=2, policy="global_cache_aware") as setup:
        book, loop = setup.router.cluster.book, asyncio.get_running_loop()
        before = book.view(loop.time()).mixed
        for _ in range(3):
            await setup.ask(DATA)
        assert all(a is b for a, b in zip(before, book.view(loop.time()).mixed, strict=True))
