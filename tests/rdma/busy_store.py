"""A store that tells how long its thread has been busy: a line on stdout for each on stdin, in seconds.

In this guest the clock of a process ticks every 10 ms and charges the whole tick to whoever runs. So the time
between two waits for events is measured, which is at least the CPU time of the store, and precise.
"""

import asyncio
import json
import selectors
import sys
import time
from typing import Any

import msgspec

from store_server.config import StoreConfig
from store_server.server import StoreServer


class BusySelector(selectors.EpollSelector):
    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        began = time.perf_counter()
        try:
            return super().select(timeout)
        finally:
            self.waited_s += time.perf_counter() - began


async def main(selector: BusySelector) -> None:
    loop = asyncio.get_running_loop()
    server = StoreServer(msgspec.json.decode(sys.argv[1], type=StoreConfig))
    await server.start()
    print(json.dumps({"port": server.tcp_port}), flush=True)
    began = time.perf_counter()

    def tell() -> None:
        if not sys.stdin.readline():
            server.stopping.set()
            return
        print(time.perf_counter() - began - selector.waited_s, flush=True)

    selector.waited_s = 0.0
    loop.add_reader(sys.stdin, tell)
    await server.stopping.wait()
    await server.stop()


if __name__ == "__main__":
    selector = BusySelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.run_until_complete(main(selector))
    loop.close()
