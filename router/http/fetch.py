"""One small request of our own to an engine (health, models): the whole answer, or why there is none."""

import asyncio

import msgspec

from router.http.leg import Leg, LegTarget, decode_body
from router.http.upstream import UpstreamPool


class Fetched(msgspec.Struct, frozen=True):
    """`status` 0: no answer, `failure` says why."""

    status: int
    body: bytes = b""
    failure: str = ""


class Probe:
    """A target beside the real one, so that our own requests do not count as load."""

    def __init__(self, pool: UpstreamPool) -> None:
        self.pool = pool
        self.in_flight = 0


class _Waiter:
    def __init__(self) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def leg_head(self, leg: Leg) -> None:
        pass

    def leg_ended(self, leg: Leg) -> None:
        self.resolve(True)

    def leg_lost(self, leg: Leg) -> None:
        self.resolve(True)

    def resolve(self, in_time: bool) -> None:
        if not self.done.done():
            self.done.set_result(in_time)


async def fetch(target: LegTarget, path: str, *, timeout_s: float, header_lines: bytes = b"") -> Fetched:
    """GET. Never raises for what the engine does."""
    loop = asyncio.get_running_loop()
    waiter = _Waiter()
    leg = Leg(waiter, target)
    head = b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path.encode(), target.pool.host_line, header_lines)
    leg.start(head, b"", loop.time())
    # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
    timer = loop.call_later(timeout_s, waiter.resolve, False)
    try:
        in_time = await waiter.done
    finally:
        timer.cancel()
        leg.cancel()
    if not in_time:
        return Fetched(0, failure=f"no answer within {timeout_s:g} s")
    if leg.failure or leg.truncated:
        return Fetched(0, failure=leg.failure or "answer too large")
    return Fetched(leg.status, decode_body(leg.held_response()))
