"""Pods of Kubernetes (v1), chosen by their labels, as engines. Pure.

A pod counts while it is ready and not being ended. Its ports are those of its containers, found by name as in
EndpointSlices; a number will do where the pod names none. A prefill engine's bootstrap port may stand in an
annotation instead, as the routers of the vllm-router family read it. A store on the pod's node is its own.
"""

from collections.abc import Iterable, Iterator

import msgspec

from kvcore.errors import ConfigError
from router.core.view import Role
from router.discovery.base import EngineEntry
from router.discovery.kubernetes_objects import Metadata, host_of, http_port, kv_events_at


class _ContainerPort(msgspec.Struct, frozen=True):
    containerPort: int
    name: str | None = None


class _Container(msgspec.Struct, frozen=True):
    ports: list[_ContainerPort] | None = None


class _Spec(msgspec.Struct, frozen=True):
    containers: list[_Container] = []


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _Status(msgspec.Struct, frozen=True):
    podIP: str = ""
    hostIP: str = ""
    conditions: list[_Condition] | None = None


class Pod(msgspec.Struct, frozen=True):
    metadata: Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def is_ready(self) -> bool:
        conditions = self.status.conditions or ()
        return (
            bool(self.status.podIP)
            and self.metadata.deletionTimestamp is None
            and any(one.type == "Ready" and one.status == "True" for one in conditions)
        )


def entries(pods: Iterable[Pod], role: Role, port: str, annotation: str) -> list[EngineEntry]:
    """By URL. `port`: name or number of the engines' HTTP port, "" for the first; `annotation`: of the
    bootstrap port. ConfigError for a pod whose ports are not what is asked for."""
    return sorted(_of_pods(pods, role, port, annotation), key=lambda entry: entry.url)


def _of_pods(pods: Iterable[Pod], role: Role, port: str, annotation: str) -> Iterator[EngineEntry]:
    for pod in pods:
        if not pod.is_ready:
            continue
        declared = [one for container in pod.spec.containers for one in container.ports or ()]
        numbers = {one.name or str(one.containerPort): one.containerPort for one in declared}
        number = http_port(numbers, port)
        if number is None:
            known = ", ".join(numbers) or "it declares none"
            raise ConfigError(f"pod {pod.metadata.name} has no port {port!r}: {known}")
        host = host_of(pod.status.podIP)
        yield EngineEntry(
            url=f"http://{host}:{number}",
            role=role,
            bootstrap_port=numbers.get("bootstrap") or _annotated_port(pod, annotation),
            kv_events=kv_events_at(host, numbers),
            store=pod.status.hostIP,
        )


def _annotated_port(pod: Pod, annotation: str) -> int:
    text = (pod.metadata.annotations or {}).get(annotation, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= 5):
        raise ConfigError(
            f"pod {pod.metadata.name}: its annotation {annotation} is {text!r}, which is no port"
        )
    return int(text or 0)
