"""The tier against a plain dict, through restarts and crashes."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcore.wire.messages import Status
from tests.unit.store_server.ssd.harness import Driver, key_of, make_data

KEYS = st.integers(0, 12).map(key_of)


class TierAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="ssd-model-"))
        self.generation = 0
        self.model: dict[bytes, bytes] = {}
        self.driver = self.start()

    def start(self) -> Driver:
        directories = [self.base / str(self.generation) / name for name in ("a", "b")]
        return Driver(*directories, segment_bytes=256 << 10, capacity_bytes=64 << 20).__enter__()

    @rule(key=KEYS, value=st.integers(0, 1 << 30), size=st.integers(0, 70_000), layers=st.integers(1, 5))
    def put(self, key: bytes, value: int, size: int, layers: int) -> None:
        if key not in self.model:
            self.model[key] = make_data(value, size)
            assert self.driver.put(key, self.model[key], layers) == Status.OK

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if self.model.pop(key, None) is not None:
            self.driver.remove(key)

    @rule(key=KEYS, aligned=st.booleans())
    def get(self, key: bytes, aligned: bool) -> None:
        assert self.driver.get(key, aligned=aligned) == self.model.get(key)

    @rule()
    def restart(self) -> None:
        self.driver.close()
        self.driver = self.start()

    @precondition(lambda self: self.generation < 5)
    @rule()
    def crash(self) -> None:
        """All that counts after a kill -9 is what the files hold at that moment: go on from a copy of
        them."""
        before = self.base / str(self.generation)
        self.generation += 1
        shutil.copytree(before, self.base / str(self.generation))
        self.driver.close()
        shutil.rmtree(before)
        self.driver = self.start()

    @invariant()
    def same_keys(self) -> None:
        assert set(self.driver.tier) == set(self.model)
        assert self.driver.tier.stats()["live_bytes"] == sum(map(len, self.model.values()))

    def teardown(self) -> None:
        for key, data in self.model.items():
            assert self.driver.get(key) == data
        self.driver.close()
        shutil.rmtree(self.base)


TierAgainstDict.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTierAgainstDict = pytest.mark.slow(TierAgainstDict.TestCase)
