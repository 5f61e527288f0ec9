"""The Kubernetes manifest fits the router it is for."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from router.cli import make_parser, read_config
from router.discovery.config import DiscoveryConfig

KUBERNETES_VERSION = "1.33"
MANIFEST = Path(__file__).parents[3] / "configs" / "kubernetes" / "router.yaml"


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


def test_every_document_is_what_kubernetes_takes(manifest: dict[str, Any]) -> None:
    assert len(manifest) == 8
    for document in manifest.values():
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_it_configures_a_router_that_would_start(
    manifest: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.toml"
    file.write_text(manifest["ConfigMap"]["data"]["router.toml"])
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert make_parser().parse_args(container["args"]).config == "/etc/mooncake/router.toml"
    (variable,) = container["env"]
    monkeypatch.setenv(variable["name"], manifest["Secret"]["stringData"]["api-keys"])
    config, _ = read_config(["--config", str(file)])
    assert config.instance_specs() == [] and config.api_keys == ("change-me",)
    assert config.discovery.source == "kubernetes"
    assert pod["terminationGracePeriodSeconds"] > config.drain_timeout_ms / 1e3
    (port,) = container["ports"]
    assert port["containerPort"] == config.port == manifest["Service"]["spec"]["ports"][0]["port"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    limit_bytes = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30
    assert limit_bytes > config.index.max_size_bytes + config.prompts.cache_size_bytes


def test_the_router_may_read_what_it_watches(manifest: dict[str, Any]) -> None:
    (rule,) = manifest["Role"]["rules"]
    assert rule["apiGroups"] == ["discovery.k8s.io"] and rule["resources"] == ["endpointslices"]
    assert {"list", "watch"} <= set(rule["verbs"])
    account = manifest["ServiceAccount"]["metadata"]["name"]
    assert manifest["RoleBinding"]["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert manifest["RoleBinding"]["roleRef"]["name"] == manifest["Role"]["metadata"]["name"]
    assert manifest["Deployment"]["spec"]["template"]["spec"]["serviceAccountName"] == account
    assert DiscoveryConfig().kubernetes_credentials.endswith("serviceaccount")
