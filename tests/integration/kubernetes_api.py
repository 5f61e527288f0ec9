"""An HTTP server that speaks the list and watch of EndpointSlices as a Kubernetes API server does (1.33):
resource versions, bookmarks, 410 for a version it has forgotten."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web


class KubernetesApi:
    """`async with`. Slices are of one namespace; requests without the `token` are a 401."""

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
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Event()
        self._epoch = 0  # of watches; those of an older one end
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> "KubernetesApi":
        app = web.Application()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        app.router.add_get(path, self._answer)
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
        wanted = request.query["labelSelector"].partition(" in (")[2].rstrip(")").split(",")
        if "watch" not in request.query:
            self.num_lists += 1
            items = [
                one
                for one in self._slices.values()
                if one["metadata"]["labels"]["kubernetes.io/service-name"] in wanted
            ]
            metadata = {"resourceVersion": str(self._version)}
            return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": items})
        return await self._watch(request, int(request.query["resourceVersion"]))

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
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
        await send("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(version)}})
        while epoch == self._epoch:
            changed = self._changed
            for at, kind, one in self._log:
                if at > version:
                    await send(kind, one)
                    version = at
            await changed.wait()
        return response
