"""EndpointSlices as engines."""

from typing import Any

import msgspec
import pytest

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.discovery.endpoint_slices import SERVICE_LABEL, EndpointSlice, entries

ROLES = {"p": Role.PREFILL, "d": Role.DECODE}


def of(service: str, endpoints: list[dict[str, Any]], ports: list[dict[str, Any]]) -> EndpointSlice:
    return msgspec.convert(
        {
            "metadata": {
                "name": f"{service}-abc",
                "labels": {SERVICE_LABEL: service},
                "resourceVersion": "1",
            },
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": ports,
        },
        EndpointSlice,
    )


def at(address: str, ready: bool | None = True) -> dict[str, Any]:
    return {"addresses": [address], "conditions": {"ready": ready}}


HTTP = {"name": "http", "port": 8000, "protocol": "TCP"}


def test_ready_endpoints_are_engines_of_their_services_role() -> None:
    slices = [
        of("p", [at("10.0.0.2"), at("10.0.0.1", None), at("10.0.0.3", False)], [HTTP]),
        of("d", [at("fd00::1")], [HTTP]),
        of("other", [at("10.9.9.9")], [HTTP]),
    ]
    assert entries(slices, ROLES, "") == [
        EngineEntry(url="http://10.0.0.1:8000", role=Role.PREFILL),
        EngineEntry(url="http://10.0.0.2:8000", role=Role.PREFILL),
        EngineEntry(url="http://[fd00::1]:8000", role=Role.DECODE),
    ]


def test_named_ports_tell_of_bootstrap_and_events() -> None:
    ports = [
        {"name": "metrics", "port": 9},
        HTTP,
        {"name": "bootstrap", "port": 8998},
        {"name": "kv-events", "port": 5557},
        {"name": "kv-events-replay", "port": 5558},
    ]
    (entry,) = entries([of("p", [at("10.0.0.1")], ports)], ROLES, "http")
    assert entry.bootstrap_port == 8998
    assert entry.kv_events == "tcp://10.0.0.1:5557,tcp://10.0.0.1:5558"
    (spec,) = checked([entry])
    assert spec.events is not None and spec.events.replay_endpoint == "tcp://10.0.0.1:5558"
    assert entries([of("p", [at("10.0.0.1")], ports)], ROLES, "9000")[0].url == "http://10.0.0.1:9000"


def test_a_port_that_is_not_there_is_said_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"no port 'api': http"):
        entries([of("p", [at("10.0.0.1")], [HTTP])], ROLES, "api")


def test_slices_without_endpoints_or_ports_hold_no_engines() -> None:
    empty = msgspec.convert(
        {"metadata": {"name": "p-x", "labels": {SERVICE_LABEL: "p"}}, "endpoints": None, "ports": None},
        EndpointSlice,
    )
    assert entries([empty], ROLES, "") == []


def test_one_engine_in_two_slices_is_one() -> None:
    assert len(entries([of("p", [at("10.0.0.1")], [HTTP])] * 2, ROLES, "")) == 1


def test_a_pod_of_two_address_families_is_one_engine() -> None:
    def of_pod(address: str, uid: str) -> dict[str, Any]:
        return {**at(address), "targetRef": {"kind": "Pod", "name": uid, "uid": uid}}

    sixth = of("d", [of_pod("fd00::1", "a"), of_pod("fd00::2", "b")], [HTTP])
    sixth = msgspec.structs.replace(sixth, addressType="IPv6")
    fourth = of("d", [of_pod("10.0.0.1", "a")], [HTTP])
    other_port = of("p", [of_pod("10.0.0.1", "a")], [{**HTTP, "port": 8001}])
    for slices in ([sixth, fourth, other_port], [other_port, fourth, sixth]):
        assert entries(slices, ROLES, "") == [
            EngineEntry(url="http://10.0.0.1:8000", role=Role.DECODE),
            EngineEntry(url="http://10.0.0.1:8001", role=Role.PREFILL),
            EngineEntry(url="http://[fd00::2]:8000", role=Role.DECODE),
        ]
