"""Pods as engines."""

from typing import Any

import kubernetes_validate
import msgspec
import pytest

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.discovery.pods import Pod, entries

ANNOTATION = DiscoveryConfig().kubernetes_bootstrap_annotation
HTTP = {"name": "http", "containerPort": 8000, "protocol": "TCP"}


def manifest(address: str, ports: list[dict[str, Any]], **metadata: Any) -> dict[str, Any]:
    """As the API server of 1.33 writes it, shortened."""
    ready = {"type": "Ready", "status": "True", "lastProbeTime": None}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"engine-{address}",
            "resourceVersion": "7",
            "labels": {"app": "vllm"},
            **metadata,
        },
        "spec": {
            "nodeName": "node-1",
            "containers": [
                {"name": "sidecar", "image": "proxy"},
                {"name": "vllm", "image": "vllm", "ports": ports},
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "10.1.0.1",
            "conditions": [{"type": "Initialized", "status": "True"}, ready],
        },
    }


def pod(address: str, ports: list[dict[str, Any]] | None = None, **metadata: Any) -> Pod:
    return msgspec.convert(manifest(address, [HTTP] if ports is None else ports, **metadata), Pod)


def found(*pods: Pod, port: str = "", role: Role = Role.MIXED) -> list[EngineEntry]:
    return entries(pods, role, port, ANNOTATION)


def test_the_shape_is_that_of_kubernetes() -> None:
    kubernetes_validate.validate(manifest("10.0.0.1", [HTTP]), "1.33", strict=True)


def test_ready_pods_are_engines_with_the_store_of_their_node() -> None:
    assert found(pod("10.0.0.2"), pod("fd00::1"), role=Role.PREFILL) == [
        EngineEntry(url="http://10.0.0.2:8000", role=Role.PREFILL, store="10.1.0.1"),
        EngineEntry(url="http://[fd00::1]:8000", role=Role.PREFILL, store="10.1.0.1"),
    ]


def test_pods_that_are_not_ready_or_on_their_way_out_are_none() -> None:
    raw = manifest("10.0.0.1", [HTTP])
    raw["status"]["conditions"][1]["status"] = "False"
    waiting = manifest("10.0.0.2", [HTTP])
    waiting["status"] = {"phase": "Pending"}
    leaving = pod("10.0.0.3", deletionTimestamp="2026-01-01T00:00:00Z")
    assert found(msgspec.convert(raw, Pod), msgspec.convert(waiting, Pod), leaving) == []


def test_named_ports_tell_of_bootstrap_and_events() -> None:
    ports = [
        HTTP,
        {"name": "bootstrap", "containerPort": 8998},
        {"name": "kv-events", "containerPort": 5557},
        {"name": "kv-events-replay", "containerPort": 5558},
    ]
    (entry,) = found(pod("10.0.0.1", ports), port="http")
    assert entry.bootstrap_port == 8998
    assert entry.kv_events == "tcp://10.0.0.1:5557,tcp://10.0.0.1:5558"
    assert checked([entry])[0].store == "10.1.0.1"


def test_the_port_may_be_a_number_that_no_container_declares() -> None:
    assert found(pod("10.0.0.1", []), port="9000")[0].url == "http://10.0.0.1:9000"
    unnamed = pod("10.0.0.1", [{"containerPort": 8080}])
    assert found(unnamed)[0].url == "http://10.0.0.1:8080"


@pytest.mark.parametrize(("ports", "wanted"), [([HTTP], "api"), ([], "")])
def test_a_port_that_is_not_there_is_said_with_those_that_are(
    ports: list[dict[str, Any]], wanted: str
) -> None:
    with pytest.raises(ConfigError, match=f"no port '{wanted}': {'http' if ports else 'it declares none'}"):
        found(pod("10.0.0.1", ports), port=wanted)


def test_the_bootstrap_port_may_be_an_annotation() -> None:
    annotated = pod("10.0.0.1", annotations={"sglang.ai/bootstrap-port": "9001"})
    assert found(annotated)[0].bootstrap_port == 9001
    with pytest.raises(ConfigError, match=r"sglang.ai/bootstrap-port is 'many'"):
        found(pod("10.0.0.1", annotations={"sglang.ai/bootstrap-port": "many"}))
