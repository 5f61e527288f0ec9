"""Shared by all tests."""

import pytest

# The contract mixins are no test modules of their own; without this their failing asserts say nothing.
pytest.register_assert_rewrite("tests.contracts")
