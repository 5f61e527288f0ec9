"""Engines in Kubernetes: behind Services (their EndpointSlices are watched), or pods chosen by labels.

The router's service account needs `get`, `list` and `watch` of endpointslices in the group discovery.k8s.io,
or of pods.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery import endpoint_slices, pods
from router.discovery.base import EngineEntry, checked
from router.discovery.config import DiscoveryConfig
from router.discovery.endpoint_slices import SERVICE_LABEL, EndpointSlice
from router.discovery.kubernetes_watch import ApiServer, KubernetesWatch
from router.discovery.pods import Pod
from router.instance_spec import InstanceSpec

logger = logging.getLogger(__name__)

# One watch, and the engines in what it knows.
_Source = tuple["KubernetesWatch[EndpointSlice] | KubernetesWatch[Pod]", Callable[[], list[EngineEntry]]]


class KubernetesDiscovery:
    def __init__(self, config: DiscoveryConfig) -> None:
        """ConfigError outside of a cluster, when no API server is named."""
        self._config = config
        credentials = Path(config.kubernetes_credentials)
        api = ApiServer(config.kubernetes_api.rstrip("/") or _api_of_cluster(), credentials)
        namespace = config.kubernetes_namespace or _own_namespace(credentials)
        self._sources: list[_Source] = []
        services = {name: role for name, role in config.kubernetes_services if name}
        if services:
            self._sources.append(self._of_services(api, namespace, services))
        for selector, role in config.kubernetes_selectors:
            if selector:
                self._sources.append(self._of_pods(api, namespace, selector, role))

    def _of_services(self, api: ApiServer, namespace: str, services: dict[str, Role]) -> _Source:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        selector = f"{SERVICE_LABEL} in ({','.join(sorted(services))})"
        watch: KubernetesWatch[EndpointSlice] = KubernetesWatch(api, path, selector, EndpointSlice)
        port = self._config.kubernetes_port
        return watch, lambda: endpoint_slices.entries(watch.objects.values(), services, port)

    def _of_pods(self, api: ApiServer, namespace: str, selector: str, role: Role) -> _Source:
        watch: KubernetesWatch[Pod] = KubernetesWatch(
            api, f"/api/v1/namespaces/{namespace}/pods", selector, Pod
        )
        port, annotation = self._config.kubernetes_port, self._config.kubernetes_bootstrap_annotation
        return watch, lambda: pods.entries(watch.objects.values(), role, port, annotation)

    async def changes(self) -> AsyncIterator[Sequence[InstanceSpec]]:
        changed = asyncio.Event()
        retry_s = self._config.interval_ms / 1e3
        tasks = [asyncio.create_task(watch.run(changed.set, retry_s)) for watch, _ in self._sources]
        last: list[EngineEntry] | None = None
        try:
            while True:
                await changed.wait()
                changed.clear()
                if not all(watch.is_known for watch, _ in self._sources):
                    continue
                try:
                    found = [entry for _, entries in self._sources for entry in entries()]
                    specs = checked(found)
                except ConfigError as error:
                    logger.warning("what Kubernetes says cannot be; the last engines stay: %s", error)
                    found, specs = last or [], []
                if found != last:
                    last = found
                    yield specs
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _own_namespace(credentials: Path) -> str:
    try:
        return (credentials / "namespace").read_text().strip() or "default"
    except OSError:
        return "default"


def _api_of_cluster() -> str:
    host, port = (
        os.environ.get("KUBERNETES_SERVICE_HOST", ""),
        os.environ.get("KUBERNETES_SERVICE_PORT", "443"),
    )
    if not host:
        raise ConfigError(
            "--discovery.source kubernetes: this is no pod (KUBERNETES_SERVICE_HOST is not set); "
            "name the API server with --discovery.kubernetes-api"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
