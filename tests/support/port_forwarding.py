"""An API server as far as `pdctl top --name` needs one: it lists pods, and forwards ports of pods over WebSocket.

Separate from `fake_api_server`, which is about watching. Where a pod's port really is, is a table; the frames are those
of Kubernetes' `v4.channel.k8s.io`: a channel's number, and first on each channel the port's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from pd_wire.names import LABEL_DEPLOYMENT, LABEL_ROLE

PROTOCOL = "v4.channel.k8s.io"


class ForwardingServer:
    """``places``: (pod, port) to (host, port) that really listens. ``refuse``: a status for every forwarding."""

    def __init__(self, namespace: str = "llm", token: str = "canary-token") -> None:
        self.namespace, self.token = namespace, token
        self.pods: list[dict[str, Any]] = []
        self.places: dict[tuple[str, int], tuple[str, int]] = {}
        self.refuse = 0
        self._runner: web.AppRunner | None = None

    def add(self, name: str, role: str, port: tuple[str, int], place: tuple[str, int], **status: Any) -> None:
        """A pod of PDDeployment `qwen` with a named port."""
        labels = {LABEL_DEPLOYMENT: "qwen", LABEL_ROLE: role}
        container = {"name": "c", "image": "i", "ports": [{"name": port[0], "containerPort": port[1]}]}
        self.pods.append(
            {
                "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
                "spec": {"containers": [container]},
                "status": {"phase": "Running", **status},
            }
        )
        self.places[name, port[1]] = place

    def kubeconfig(self, path: Path) -> Path:
        """Write one that leads here."""
        assert self._runner is not None
        server = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": self.token}}],
        }
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    async def start(self) -> None:
        """Listen on loopback."""
        app = web.Application()
        pods = f"/api/v1/namespaces/{self.namespace}/pods"
        app.router.add_get(pods, self._list)
        app.router.add_get(pods + "/{name}/portforward", self._forward)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _allow(self, request: web.Request) -> None:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized

    async def _list(self, request: web.Request) -> web.Response:
        self._allow(request)
        wanted = dict(pair.split("=") for pair in request.query["labelSelector"].split(","))
        items = [pod for pod in self.pods if wanted.items() <= labels_of(pod).items()]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        self._allow(request)
        if self.refuse:
            return web.Response(status=self.refuse)
        port = int(request.query["ports"])
        socket = web.WebSocketResponse(protocols=(PROTOCOL,))
        await socket.prepare(request)
        assert socket.ws_protocol == PROTOCOL
        for channel in (0, 1):
            await socket.send_bytes(bytes([channel]) + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection(*self.places[request.match_info["name"], port])
        except OSError as error:
            await socket.send_bytes(b"\1" + f"error forwarding port {port}: {error.strerror}\n".encode())
            await socket.close()
            return socket
        back = asyncio.create_task(self._back(reader, socket))
        try:
            async for message in socket:
                assert message.type is WSMsgType.BINARY
                assert message.data[0] == 0
                writer.write(message.data[1:])
        finally:
            back.cancel()
            writer.close()
        return socket

    @staticmethod
    async def _back(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
        # Small pieces: a page comes in more than one frame.
        try:
            while data := await reader.read(1000):
                await socket.send_bytes(b"\0" + data)
        except ConnectionError:
            pass  # as good as an end
        await socket.close()


def labels_of(pod: Mapping[str, Any]) -> Mapping[str, str]:
    """A pod's labels."""
    labels: Mapping[str, str] = pod["metadata"]["labels"]
    return labels
