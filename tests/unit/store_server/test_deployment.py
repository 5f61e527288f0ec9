"""The systemd unit, the Kubernetes manifest and the Prometheus texts fit the store they are for."""

import argparse
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import tomllib
import yaml

from kvcore import metrics
from kvcore.config import load_config
from kvcore.errors import ConfigError
from kvcore.units import parse_size_bytes
from router.config import RouterConfig
from store_server.cli import make_parser
from store_server.config import StoreConfig
from store_server.core.store import Store, StoreLimits
from store_server.metric_help import HELP
from store_server.notify import notify
from store_server.remote import RemoteConfig, RemoteTier
from store_server.ssd import DiskConfig, SsdConfig, SsdTier
from tests.unit.store_server.remote.scripted import ScriptedBackend

DEADLINE_S = 60.0
KUBERNETES_VERSION = "1.33"
CONFIGS = Path(__file__).parents[3] / "configs"
UNIT = (CONFIGS / "systemd" / "mooncake-store.service").read_text()
SAVE_S = StoreConfig().save_timeout_ms / 1e3


def parsed(command: list[str]) -> argparse.Namespace:
    return make_parser().parse_args(command)


def unit_setting(name: str) -> str:
    (value,) = [line.partition("=")[2] for line in UNIT.splitlines() if line.startswith(f"{name}=")]
    return value


def test_the_unit_starts_a_store_and_gives_it_time_to_end() -> None:
    command = shlex.split(unit_setting("ExecStart"))
    assert command[0].endswith("/mooncake-store") and parsed(command[1:]).log_json is True
    assert float(unit_setting("TimeoutStopSec")) > SAVE_S
    assert int(unit_setting("LimitNOFILE")) > StoreConfig().max_connections


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all((CONFIGS / "kubernetes" / "store.yaml").read_text())
    return {document["kind"]: document for document in documents}


def test_the_manifest_configures_a_store_that_would_start(manifest: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text(manifest["ConfigMap"]["data"]["store.toml"])
    config = load_config(StoreConfig, file=file)
    config.check()
    pod = manifest["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert parsed(container["args"]).config == "/etc/mooncake/store.toml"
    assert pod["terminationGracePeriodSeconds"] > config.save_timeout_ms / 1e3
    memory_bytes = parse_size_bytes(container["resources"]["limits"]["memory"].replace("Gi", "gb"))
    assert memory_bytes > config.dram_bytes()

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["store"] == config.port and ports["admin"] == config.admin_port
    assert config.events.endpoint.endswith(f":{ports['events']}")
    assert config.events.replay_endpoint.endswith(f":{ports['replay']}")
    assert ports == {port["name"]: port["port"] for port in manifest["Service"]["spec"]["ports"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {path for level in config.storage_levels for path in level.paths} <= mounts


def test_the_manifest_hangs_together(manifest: dict[str, Any]) -> None:
    name = manifest["StatefulSet"]["metadata"]["name"]
    labels = manifest["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["StatefulSet"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["Service"]["spec"]["selector"] == labels
    assert manifest["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert manifest["StatefulSet"]["spec"]["serviceName"] == name == manifest["Service"]["metadata"]["name"]
    container = manifest["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    secrets = [one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one]
    assert secrets == [{"name": manifest["Secret"]["metadata"]["name"], "key": "token"}]


def verified_unit(directory: Path, text: str) -> str:
    """What systemd has to say against it; nothing, if all is well."""
    unit = directory / "mooncake-store.service"
    # systemd also checks that the program is there.
    unit.write_text(text.replace("/opt/mooncake/bin/mooncake-store", sys.executable))
    result = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    return (result.stdout + result.stderr).strip()


@pytest.mark.slow  # not slow, but in need of systemd-analyze, which the whole of scripts/test installs
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    assert verified_unit(tmp_path, UNIT) == ""
    assert "RestartSecs" in verified_unit(tmp_path, UNIT.replace("RestartSec=", "RestartSecs="))
    assert "not executable" in verified_unit(
        tmp_path, UNIT.replace("ExecStart=", "ExecStart=/no/such/program ")
    )


def test_kubernetes_knows_every_field_of_the_manifest() -> None:
    text = (CONFIGS / "kubernetes" / "store.yaml").read_text()
    documents = list(yaml.safe_load_all(text))
    assert len(documents) >= 4
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    misspelt = list(yaml.safe_load_all(text.replace("containerPort", "containerPorts")))
    with pytest.raises(kubernetes_validate.ValidationError):
        for document in misspelt:
            kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_the_image_has_what_store_and_router_need() -> None:
    dockerfile = (CONFIGS / "kubernetes" / "Dockerfile").read_text()
    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]
    assert "[store,remote,router,discovery]" in dockerfile
    assert {"store", "remote", "router", "discovery"} <= set(project["optional-dependencies"])
    assert f"mooncake-store:{project['version']}" in dockerfile
    for manifest in ("store.yaml", "router.yaml"):
        assert f"mooncake-store:{project['version']}" in (CONFIGS / "kubernetes" / manifest).read_text()


def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        for address in (str(tmp_path / "n"), f"\0mooncake-test-{id(systemd)}"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
                listener.bind(address)
                monkeypatch.setenv("NOTIFY_SOCKET", address.replace("\0", "@"))
                notify("READY=1")
                assert listener.recv(100) == b"READY=1"


def test_every_number_of_the_store_is_explained(tmp_path: Path) -> None:
    tier = SsdTier(SsdConfig(disks=(DiskConfig(path=tmp_path, capacity_bytes=64 << 20),)), lambda: None)
    remote = RemoteTier(RemoteConfig(url="file:///nowhere"), ScriptedBackend(), lambda: None, lambda: None)
    names = {
        *Store(StoreLimits(pool_size_bytes=1 << 20)).stats(),
        *(metrics.SSD_PREFIX + name for name in tier.stats()),
        *(metrics.REMOTE_PREFIX + name for name in remote.stats()),
        metrics.REMOTE_COPIES_PENDING,
        metrics.REMOTE_COPIES_MISSED_TOTAL,
        metrics.CONNECTIONS,
        metrics.REQUESTS_TOTAL,
        metrics.QUEUE_PAIRS,
        metrics.LOAD,
        metrics.COPYING,
        metrics.COPIED_OBJECTS_TOTAL,
        metrics.COPIED_BYTES_TOTAL,
        metrics.COPY_MISSING_TOTAL,
        metrics.COPY_FAILED_TOTAL,
        metrics.EVENTS_TOTAL,
        metrics.EVENT_REPLAYS_TOTAL,
        metrics.EVENT_SNAPSHOTS_TOTAL,
    }
    assert names - set(HELP) == set(), "say in store_server/metric_help.py what these mean"
    assert set(HELP) - names == set(), "these are explained but never told"


@pytest.mark.parametrize(
    ("schema", "prefix"), [(StoreConfig, "MOONCAKE_STORE"), (RouterConfig, "MOONCAKE_ROUTER")]
)
def test_a_service_of_the_same_name_does_not_configure_its_pods(
    schema: type[msgspec.Struct], prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What Kubernetes puts into the environment of every pod beside a Service `mooncake-store`, say."""
    links = {
        f"{prefix}_SERVICE_HOST": "10.0.0.1",
        f"{prefix}_SERVICE_PORT": "30000",
        f"{prefix}_SERVICE_PORT_HTTP": "30000",
        f"{prefix}_PORT": "tcp://10.0.0.1:30000",
        f"{prefix}_PORT_30000_TCP": "tcp://10.0.0.1:30000",
        f"{prefix}_PORT_30000_TCP_PROTO": "tcp",
        f"{prefix}_PORT_30000_TCP_PORT": "30000",
        f"{prefix}_PORT_30000_TCP_ADDR": "10.0.0.1",
    }
    assert load_config(schema, env_prefix=prefix, environ=links) == schema()
    assert caplog.text == ""
    with pytest.raises(ConfigError, match=f"{prefix}_PORT"):
        load_config(schema, env_prefix=prefix, environ={f"{prefix}_PORT": "http"})
