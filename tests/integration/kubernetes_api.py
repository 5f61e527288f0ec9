"""An HTTP server that speaks the list and watch of EndpointSlices and of pods as a Kubernetes API server does
(1.33): label selectors, resource versions, bookmarks, 410 for a version it has forgotten."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web


class KubernetesApi:
    """`async with`. Everything is of one namespace; requests without the `token` are a 401."""

    def __init__(self, namespace: str, token: str) -> None:
        self._namespace = namespace
        self.token = token
        self.is_down = False
        self.num_lists = 0
        self.num_unauthorized = 0
        self.url = ""
        self._version = 1
        self._oldest = 1
        self._slices: dict[str, dict[str, Any]] = {}
        self._pods: dict[str, dict[str, Any]] = {}
        self.selectors: set[str] = set()  # that were asked for
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._epoch = 0  # of watches; those of an older one end
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "KubernetesApi":
        app = web.Application()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        app.router.add_get(path, self._answer)
        app.router.add_get(f"/api/v1/namespaces/{self._namespace}/pods", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.end_watches()
        assert self._runner is not None
        await self._runner.cleanup()

    def set_slices(self, ports_of: Mapping[str, Sequence[int]], service: str) -> None:
        """A slice for each name, each with the local engines of these ports; others are deleted."""
        for name in self._slices.keys() - ports_of.keys():
            self._log_change("DELETED", self._slices.pop(name))
        for name, ports in ports_of.items():
            kind = "MODIFIED" if name in self._slices else "ADDED"
            one = {
                "kind": "EndpointSlice",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
                "addressType": "IPv4",
                "endpoints": [
                    {
                        "addresses": ["127.0.0.1"],
                        "conditions": {"ready": True, "serving": True, "terminating": False},
                        "targetRef": {"kind": "Pod", "name": f"{name}-0"},
                    }
                ],
                "ports": [{"name": "http", "port": ports[0], "protocol": "TCP"}],
            }
            self._slices[name] = one
            self._log_change(kind, one)

    def set_pods(self, ports_of: Mapping[str, int], **labels: str) -> None:
        """A ready pod for each name, here, with these labels; others with these labels are deleted."""
        for name in [name for name, one in self._pods.items() if one["metadata"]["labels"] == labels]:
            if name not in ports_of:
                self._log_change("DELETED", self._pods.pop(name))
        for name, port in ports_of.items():
            kind = "MODIFIED" if name in self._pods else "ADDED"
            one = {
                "kind": "Pod",
                "apiVersion": "v1",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": port}]}]
                },
                "status": {
                    "phase": "Running",
                    "podIP": "127.0.0.1",
                    "hostIP": "10.1.0.1",
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }
            self._pods[name] = one
            self._log_change(kind, one)

    def _log_change(self, kind: str, one: dict[str, Any]) -> None:
        self._version += 1
        one["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, kind, json.loads(json.dumps(one))))
        self._wake()

    def end_watches(self) -> None:
        """As after their timeout."""
        self._epoch += 1
        self._wake()

    def forget_history(self) -> None:
        """Watches end, and cannot go on from where they were."""
        self._version += 1
        self._oldest = self._version
        self.end_watches()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            return web.json_response({"kind": "Status", "code": 500}, status=500)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            self.num_unauthorized += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        kind = "Pod" if request.path.endswith("/pods") else "EndpointSlice"
        selector = request.query["labelSelector"]
        self.selectors.add(selector)
        if "watch" not in request.query:
            self.num_lists += 1
            objects = self._pods if kind == "Pod" else self._slices
            items = [one for one in objects.values() if _matches(one, selector)]
            metadata = {"resourceVersion": str(self._version)}
            return web.json_response({"kind": f"{kind}List", "metadata": metadata, "items": items})
        return await self._watch(request, int(request.query["resourceVersion"]), kind, selector)

    async def _watch(
        self, request: web.Request, version: int, kind_watched: str, selector: str
    ) -> web.StreamResponse:
        epoch = self._epoch
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)

        async def send(kind: str, one: dict[str, Any]) -> None:
            line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
            await response.write(line[:7])  # lines come in pieces
            await response.write(line[7:])

        if version < self._oldest:
            await send("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
            return response
        await send("BOOKMARK", {"kind": kind_watched, "metadata": {"resourceVersion": str(version)}})
        while epoch == self._epoch:
            changed = self._changed
            for at, kind, one in self._log:
                if at <= version:
                    continue
                version = at
                if one["kind"] == kind_watched and _matches(one, selector):
                    await send(kind, one)
            await changed.wait()
        return response


def _matches(one: dict[str, Any], selector: str) -> bool:
    """Terms KEY=VALUE and KEY in (VALUE,VALUE), all of which must hold."""
    labels = one["metadata"]["labels"]
    for key, values in re.findall(r"([^,()\s]+) in \(([^)]*)\)", selector):
        if labels.get(key) not in values.split(","):
            return False
    terms = re.sub(r"[^,()\s]+ in \([^)]*\)", "", selector)
    return all(labels.get(k) == v for k, v in (t.split("=") for t in terms.split(",") if t))
