"""Shared by all tests."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No test asserts a time, and a slow machine is no bug.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# The contract mixins are no test modules of their own; without this their failing asserts say nothing.
pytest.register_assert_rewrite("tests.contracts")


@pytest.fixture(autouse=True)
def _log_levels_are_put_back() -> Iterator[None]:
    """A command line run inside this process quietens our libraries for the rest of it."""
    logger = logging.getLogger("kvcore")
    level = logger.level
    yield
    logger.setLevel(level)
