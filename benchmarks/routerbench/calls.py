"""How many calls of each kind a router makes to its engines for one request, counted by the engines."""

import contextlib
import http.client
import itertools
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from routerbench.cases import Case, bodies
from routerbench.engine_api import CALLS_PATH, CHAT

_NUM_REQUESTS = 8
_TIMEOUT_S = 30.0
_QUIET_S = 0.05


def engine_calls(case: Case, port: int, engine_ports: Sequence[int]) -> dict[str, float]:
    """By path. Of requests that nobody cuts off, one after the other; GETs (health, metrics) are no part of a
    request. Raises OSError or http.client.HTTPException when somebody does not answer."""
    before = _quiet_counts(engine_ports)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as router:
        for body in itertools.islice(bodies(case), _NUM_REQUESTS):
            router.request("POST", CHAT.decode(), body, {"content-type": "application/json"})
            router.getresponse().read()
    made = _counts(engine_ports) - before
    return {path: count / _NUM_REQUESTS for path, count in sorted(made.items())}


def _quiet_counts(engine_ports: Sequence[int]) -> Counter[str]:
    """Once it is over what a router still had to do for requests that were cut off."""
    counts = _counts(engine_ports)
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        time.sleep(_QUIET_S)
        before, counts = counts, _counts(engine_ports)
        if counts == before:
            return counts
    raise OSError(f"engines are still being asked {_TIMEOUT_S:.0f} s after the last request")


def _counts(engine_ports: Sequence[int]) -> Counter[str]:
    total: Counter[str] = Counter()
    for port in engine_ports:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)) as engine:
            engine.request("GET", CALLS_PATH.decode())
            counts = msgspec.json.decode(engine.getresponse().read(), type=dict[str, int])
        posts = {name.removeprefix("POST "): n for name, n in counts.items() if name.startswith("POST ")}
        total.update(posts)
    return total
