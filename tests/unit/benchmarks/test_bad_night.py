"""The judges of a bad night can find somebody guilty, and its links really go wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from badnight.client import Asked
from badnight.diary import Diary
from badnight.link import Link
from badnight.questions import Question, prompts
from routersoak.client import Ending

DEADLINE_S = 60.0
SENT = bytes(range(256)) * 8


def asked(ending: Ending, *, is_wrong: bool = False) -> Asked:
    now = asyncio.get_running_loop().time()
    return Asked(
        whom="mixed",
        question=Question(0, streams=True),
        began_s=now,
        ended_s=now,
        ending=ending,
        tokens=[1],
        is_wrong=is_wrong,
    )


@pytest.mark.parametrize(
    ("ending", "is_wrong", "fault", "is_guilty"),
    [
        (Ending.ANSWERED, False, "kill", False),
        (Ending.ANSWERED, True, "kill engine", True),
        (Ending.LEFT, True, "kill engine", True),
        (Ending.HUNG, False, "kill engine", True),
        (Ending.FAILED, False, "kill engine", False),
        (Ending.BROKEN_OFF, False, "kill router", False),
        (Ending.FAILED, False, "kill", True),  # a store's trouble is nobody's excuse
        (Ending.CUT, False, "", True),
    ],
)
def test_who_is_guilty(ending: Ending, is_wrong: bool, fault: str, is_guilty: bool) -> None:
    async def judged() -> Diary:
        diary = Diary()
        if fault:
            diary.begin(fault, "it")
        diary.judge(asked(ending, is_wrong=is_wrong))
        return diary

    diary = asyncio.run(judged())
    assert bool(diary.complaints) == is_guilty
    assert all(fault in complaint for complaint in diary.complaints)


def test_prompts_begin_alike_and_fit_the_engines() -> None:
    assert prompts() == prompts()
    assert len({tuple(prompt[:32]) for prompt in prompts()}) < len(prompts()) / 2
    assert all(max(prompt) < 256 and len(prompt) < 1500 for prompt in prompts())


@contextlib.asynccontextmanager
async def echo_behind_a_link() -> AsyncIterator[tuple[Link, asyncio.StreamReader, asyncio.StreamWriter]]:
    ended = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link(server.sockets[0].getsockname()[1], "seed")
    await link.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        yield link, reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await link.close()
        server.close()
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What comes back, until the connection ends."""
    writer.write(SENT)
    try:
        return await asyncio.wait_for(reader.readexactly(len(SENT)), DEADLINE_S)
    except asyncio.IncompleteReadError as error:
        return error.partial


@pytest.mark.parametrize("fault", ["none", "stall", "flip", "truncate", "cut"])
def test_a_link_does_what_it_is_told(fault: str) -> None:
    async def returned() -> tuple[bytes, int]:
        async with echo_behind_a_link() as (link, reader, writer):
            assert await exchange(reader, writer) == SENT
            link.truncates = fault == "truncate"
            link.flip_every_bytes = int(fault == "flip")
            if fault == "cut":
                link.cut()
            if fault == "stall":
                link.stall()
                asyncio.get_running_loop().call_later(0.1, link.flow)
            with contextlib.suppress(ConnectionError):
                return await exchange(reader, writer), link.num_flipped
            return b"", link.num_flipped

    data, num_flipped = asyncio.run(returned())
    if fault in ("none", "stall"):
        assert data == SENT
    elif fault == "flip":
        bits = sum((a ^ b).bit_count() for a, b in zip(data, SENT, strict=True))
        assert 1 <= bits <= num_flipped
    else:
        assert data in (b"", SENT[: len(data)]) and len(data) < len(SENT)
