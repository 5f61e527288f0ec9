"""`mooncake-router profile` against an engine that streams, and against what can go wrong."""

import asyncio
import sys

import msgspec

from router.config import RouterConfig
from tests.integration.router_harness import DEADLINE_S, MockEngine, async_test, fails

SMALL = ("--lengths", "32,64,128", "--batches", "1,2,3", "--contexts", "32,64", "--repeats", "1")


async def profile(url: str, *flags: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "router.cli", "profile", "--url", url, "--model", "m", *SMALL, *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@async_test
async def test_it_prints_a_configuration() -> None:
    engine = await MockEngine("m").start()
    status, out, err = await profile(engine.url, "--api-key", "k")
    assert (status, err) == (0, "")
    config = msgspec.toml.decode(out, type=RouterConfig)
    assert config.scheduling.prefill_model.compute_ms(64, 0) > 0
    bodies = [seen.body for seen in engine.seen]
    assert {len(body["prompt"]) for body in bodies} >= {32, 64, 128}
    assert all(body["stream"] and body["ignore_eos"] for body in bodies)
    assert engine.seen[0].headers["authorization"] == "Bearer k"
    await engine.stop()


@async_test
async def test_refusals_and_absence_are_said() -> None:
    engine = await MockEngine("m").start()
    engine.default = fails(404)
    status, _, err = await profile(engine.url)
    assert status == 2 and "m says 404" in err
    await engine.stop()
    status, _, err = await profile(engine.url)
    assert status == 2 and str(engine.port) in err
