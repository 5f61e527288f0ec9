"""A minute of benchmarks/router_soak.py: engines die and come back, nothing hangs, nothing is left.

Compiled, since what mypyc makes of reference counts shows nowhere else; cycles of the same code in Python are
counted elsewhere.
"""

import asyncio
from pathlib import Path

import pytest
from routersoak.client import Ending
from routersoak.soak import Plan, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_minute_of_traffic_while_engines_are_killed_and_restarted(tmp_path: Path) -> None:
    plan = Plan(seconds=60.0, requests_per_s=8.0, chaos_every_s=4.0, compiled=True)
    outcomes = asyncio.run(soak(tmp_path, plan, lambda text: None))
    assert [one.router for one in outcomes] == ["mixed", "split"]
    for one in outcomes:
        assert one.complaints() == []
        assert one.engine_troubles["killed and restarted"] >= 3
        assert one.endings[Ending.ANSWERED.value] > one.requests / 2
        # Neither clients that left nor engines that died leave a socket behind.
        assert one.open_files[2] < one.open_files[0] + 50
