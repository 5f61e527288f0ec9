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
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leg_head(self, leg: Leg) -> None:
        pass

    def leg_ended(self, leg: Leg) -> None:
        if not self.done.done():
            self.done.set_result(None)

    leg_lost = leg_ended


async def fetch(target: LegTarget, path: str, *, timeout_s: float, header_lines: bytes = b"") -> Fetched:
    """GET. Never raises for what the engine does."""
    waiter = _Waiter()
    leg = Leg(waiter, target)
    head = b"GET %b HTTP/1.1\r\n%b%b\r\n" % (path.encode(), target.pool.host_line, header_lines)
    leg.start(head, b"", asyncio.get_running_loop().time())
    try:
        await asyncio.wait_for(waiter.done, timeout_s)
    except asyncio.TimeoutError:
        return Fetched(0, failure=f"no answer within {timeout_s:g} s")
    finally:
        leg.cancel()
    if leg.failure or leg.truncated:
        return Fetched(0, failure=leg.failure or "answer too large")
    return Fetched(leg.status, decode_body(leg.held_response()))
