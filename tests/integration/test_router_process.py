"""`mooncake-router` as a user runs it: a process, its ready line and file, signals, exit status."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.integration.router_harness import (
    DEADLINE_S,
    Behaviour,
    Client,
    MockEngine,
    Turn,
    async_test,
    until,
)

PROMPT = {"model": "m", "prompt": "Once upon a time"}


@asynccontextmanager
async def router_process(*flags: str, enter: Sequence[str] = ()) -> AsyncIterator[asyncio.subprocess.Process]:
    """`enter`: words in front of the command."""
    command = [*enter, sys.executable, "-m", "router.cli", "--port", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1, env=dict(os.environ))
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def first_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)).decode()


async def connect(ready_line: str) -> Client:
    port = int(ready_line.split("http://127.0.0.1:")[1].split()[0])
    return Client(*await asyncio.open_connection("127.0.0.1", port))


def held_answer() -> tuple[asyncio.Event, Callable[[Turn], Awaitable[None]]]:
    """(what lets it go, an engine's turn that answers then)."""
    go_on = asyncio.Event()

    async def later(turn: Turn) -> None:
        await go_on.wait()
        await turn.answer(200, {"done": True})

    return go_on, later


async def exit_status(process: asyncio.subprocess.Process) -> int:
    return await asyncio.wait_for(process.wait(), DEADLINE_S)


def test_it_serves_says_where_and_drains(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        go_on, later = held_answer()
        prefill, decode = await MockEngine("p").start(), await MockEngine("d").start()
        file = tmp_path / "ready.json"
        async with router_process(
            "--prefill", prefill.url, "--decode", decode.url, "--ready-file", str(file), "--log-json"
        ) as process:
            line = await first_line(process)
            assert line.startswith("mooncake-router ready on http://127.0.0.1:")
            assert "1 prefill by round_robin, 1 decode by round_robin, protocol suite" in line
            ready = json.loads(file.read_text())
            assert ready["pid"] == process.pid and ready["url"] in line
            client = await connect(line)
            assert (await client.ask("/v1/completions", PROMPT)).json["served_by"] == "d"
            await until(lambda: [seen.transfer["role"] for seen in prefill.seen] == ["prefill"])
            decode.script.append(later)
            await client.send("/v1/completions", PROMPT)
            await until(lambda: len(decode.seen) == 2)
            process.send_signal(signal.SIGTERM)
            assert "draining" in await first_line(process)
            go_on.set()
            assert (await client.answer()).json == {"done": True}
            assert await exit_status(process) == 0
            assert not file.exists()
            assert process.stderr is not None
            logged = [json.loads(text) for text in (await process.stderr.read()).decode().splitlines()]
            assert {"instance joined", "instance up"} <= {entry["message"] for entry in logged}
            client.close()
        await prefill.stop()
        await decode.stop()

    check()


@async_test
async def test_a_second_signal_ends_it_at_once() -> None:
    async def forever(turn: Turn) -> None:
        await turn.gone()

    engine = await MockEngine("m").start()
    engine.default = forever
    async with router_process("--worker-urls", engine.url) as process:
        client = await connect(await first_line(process))
        await client.send("/v1/completions", PROMPT)
        await until(lambda: len(engine.seen) == 1)
        process.send_signal(signal.SIGINT)
        assert "draining" in await first_line(process)
        process.send_signal(signal.SIGINT)
        assert await exit_status(process) == 0
        await until(lambda: engine.num_abandoned == 1)
        client.close()
    await engine.stop()


@async_test
async def test_a_mistake_is_one_line_and_status_2() -> None:
    async with router_process("--worker-urls", "https://secure:1") as process:
        out, err = await process.communicate()
        assert (process.returncode, out) == (2, b"")
        assert err.decode().count("\n") == 1 and "over http://" in err.decode()


@async_test
async def test_clients_it_has_no_files_for_are_told_so_and_harm_nobody() -> None:
    num_files, num_affordable = 140, 4  # (140 - 128) / 3
    engine = await MockEngine("m").start()
    limited = ["bash", "-c", f'ulimit -n {num_files}; exec "$@"', "bash"]
    async with router_process("--worker-urls", engine.url, enter=limited) as process:
        line = await first_line(process)
        served = [await connect(line) for _ in range(num_affordable)]
        for client in served:
            assert (await client.ask("/health")).status == 200
        others = [await connect(line) for _ in range(num_files)]
        for client in others:
            assert (await asyncio.wait_for(client.answer(), DEADLINE_S)).status == 503
            client.close()
        engine.default = _after_all(num_affordable)
        answers = await asyncio.gather(*(client.ask("/v1/completions", PROMPT) for client in served))
        assert [answer.status for answer in answers] == [200] * num_affordable
        for client in served:
            client.close()
        process.send_signal(signal.SIGTERM)
        assert await exit_status(process) == 0
    await engine.stop()


def test_it_drains_whoever_reads_its_output(tmp_path: Path) -> None:
    @async_test
    async def check() -> None:
        go_on, later = held_answer()
        engine = await MockEngine("m").start()
        engine.script.append(later)
        file = tmp_path / "ready.json"
        on_a_full_disk = ["bash", "-c", 'exec "$@" >/dev/full', "bash"]
        flags = ("--worker-urls", engine.url, "--ready-file", str(file))
        async with router_process(*flags, enter=on_a_full_disk) as process:
            await until(lambda: file.exists() or process.returncode is not None)
            assert process.returncode is None
            client = await connect(json.loads(file.read_text())["url"])
            await client.send("/v1/completions", PROMPT)
            await until(lambda: len(engine.seen) == 1)
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(_nobody_listens(json.loads(file.read_text())["port"]), DEADLINE_S)
            go_on.set()
            assert (await client.answer()).json == {"done": True}
            assert await exit_status(process) == 0
            client.close()
        await engine.stop()

    check()


async def _nobody_listens(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            return
        writer.close()
        await asyncio.sleep(0.01)


def _after_all(num_requests: int) -> Behaviour:
    """Answers when so many are there, each on a connection of its own."""

    async def behave(turn: Turn) -> None:
        await until(lambda: len(turn.engine.seen) == num_requests)
        await turn.answer(200, {})

    return behave
