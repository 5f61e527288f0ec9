"""The inside of a process that holds one system under test: it does what it is told and says what that took.

Only the standard library and uvloop: a peer's interpreter runs it too.
"""

import argparse
import asyncio
import inspect
import json
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import uvloop

# So many are under way at once where choosing is asynchronous, as in a router under load: a single one would
# be measured with all that putting a process to sleep and waking it takes.
AT_ONCE = 8

Operation = Callable[[], object]


def serve(make_subject: Callable[[], Any]) -> None:
    """Calls methods of the subject, which is made inside of the event loop, until the other end closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args().control_fd)
    uvloop.run(_serve(make_subject, control))


async def _serve(make_subject: Callable[[], Any], control: socket.socket) -> None:
    control.setblocking(True)
    stream = control.makefile("rw", encoding="utf-8")
    subject = make_subject()
    while line := await asyncio.to_thread(stream.readline):
        command = json.loads(line)
        try:
            result = getattr(subject, command["call"])(*command["arguments"])
            if inspect.isawaitable(result):
                result = await result
            answer = {"result": result}
        except Exception:
            answer = {"error": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()
    await subject.close()


async def cpu_us(operation: Operation, min_s: float) -> float:
    """CPU microseconds of one call, of all threads of this process together."""
    is_async = inspect.isawaitable(first := operation())
    if is_async:
        await _awaited(first)
    number = AT_ONCE
    while True:
        started = time.process_time()
        if is_async:
            for _ in range(number // AT_ONCE):
                await asyncio.gather(*[_awaited(operation()) for _ in range(AT_ONCE)])
        else:
            for _ in range(number):
                operation()
        spent = time.process_time() - started
        if spent >= min_s:
            return spent / number * 1e6
        number *= 2


async def _awaited(started: Any) -> object:
    return await started
