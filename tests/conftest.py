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
def _logging_is_put_back() -> Iterator[None]:
    """A command line run inside this process quietens our libraries for the rest of it, and has the root
    logger write to what is standard error during one test."""
    loggers = (logging.getLogger("kvcore"), logging.getLogger())
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for handler in list(loggers[1].handlers):
        if type(handler) is logging.StreamHandler:
            loggers[1].removeHandler(handler)
