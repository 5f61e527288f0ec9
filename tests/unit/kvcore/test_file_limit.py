"""How many clients the limit of open files affords."""

import resource
from functools import partial

import pytest

from kvcore.errors import ConfigError
from kvcore.file_limit import affordable_connections

affordable = partial(affordable_connections, files_per_client=2, own_files=64)


def test_clients_are_limited_by_open_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [256, 1024]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(0, new[0]))
    assert affordable(100) == 100
    assert limits[0] == 264, "the soft limit is raised as far as needed"
    assert affordable(4096) == 480
    assert limits[0] == 1024 and "ulimit -n" in caplog.text
    limits[:] = [60, 60]
    with pytest.raises(ConfigError, match="leaves none"):
        affordable(10)
