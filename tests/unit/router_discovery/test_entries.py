"""Engines as they are written down, and what of it is refused."""

import pytest

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.instance_spec import InstanceSpec
from router.kv_events.source import EventSource


def test_ranks_are_instances_with_their_own_events() -> None:
    entry = EngineEntry(
        url="10.0.0.1:8000",
        role=Role.PREFILL,
        bootstrap_port=8998,
        data_parallel_size=2,
        kv_events="tcp://10.0.0.1:5557,tcp://10.0.0.1:6000",
    )
    assert checked([entry]) == [
        InstanceSpec(
            "http://10.0.0.1:8000",
            Role.PREFILL,
            rank,
            8998,
            EventSource(f"tcp://10.0.0.1:{5557 + rank}", f"tcp://10.0.0.1:{6000 + rank}"),
        )
        for rank in range(2)
    ]
    assert [spec.url for spec in checked([entry])] == ["http://10.0.0.1:8000@0", "http://10.0.0.1:8000@1"]


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ([EngineEntry(url="http://a:1"), EngineEntry(url="a:1")], "given twice"),
        ([EngineEntry(url="http://a:1"), EngineEntry(url="http://b:1", role=Role.DECODE)], "cannot be mixed"),
        ([EngineEntry(url="ftp://a:1")], "over http://"),
        ([EngineEntry(url="http://a:1", bootstrap_port=70000)], "is no port"),
        ([EngineEntry(url="http://a:1", data_parallel_size=0)], "at least 1"),
        ([EngineEntry(url="http://a:1", kv_events="nowhere")], "tcp://HOST:PORT"),
    ],
)
def test_mistakes_are_named(entries: list[EngineEntry], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checked(entries)
