"""A small Kubernetes API server: lists and watches pods over real HTTP, and fails in the ways that real ones do.

Separate because discovery must be right about the wire: versions, bookmarks, pages, selectors, 410 in both forms,
watches that fall silent or break off, throttling, and a server that is away. It holds pods as plain objects and knows
nothing of what they mean.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Pod = dict[str, Any]
BOOKMARK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Asked:
    """One request that arrived."""

    verb: str
    query: Mapping[str, str]
    authorization: str | None


@dataclass(slots=True)
class _Refusal:
    verb: str
    status: int
    times: int
    headers: Mapping[str, str]


@dataclass(eq=False, slots=True)
class _Watch:
    selector: str
    lines: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    silent: bool = False
    request: web.Request | None = None


class FakeApiServer:
    """One namespace's pods. Every change raises the version, as etcd does."""

    def __init__(self, token: str = "canary-token", tls: ssl.SSLContext | None = None) -> None:
        self.token = token
        self.bookmark_seconds = BOOKMARK_SECONDS
        self.asked: list[Asked] = []
        self.pods: dict[str, Pod] = {}
        self.version = 1000
        self.port = 0
        self._oldest = 0
        self._history: list[tuple[int, str, Pod, Pod | None]] = []
        self._watches: set[_Watch] = set()
        self._refusals: list[_Refusal] = []
        self._tls = tls
        self._runner: web.AppRunner | None = None

    # -- process ---------------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen, on the same port as before. Harmless when it does already."""
        if self._runner is not None:
            return
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Be away: refuse connections and cut those that there are."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        for site in list(runner.sites):
            await site.stop()
        for connection in list(runner.server.connections) if runner.server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    def kubeconfig(self) -> str:
        """A file's text that leads here. JSON is YAML."""
        cluster = {"server": f"http://127.0.0.1:{self.port}"}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                "clusters": [{"name": "here", "cluster": cluster}],
                "users": [{"name": "me", "user": {"token": self.token}}],
            }
        )

    # -- pods ------------------------------------------------------------------------------------
    def put(self, pod: Pod) -> None:
        """Create the pod, or replace the one of that name."""
        name = pod["metadata"]["name"]
        before = self.pods.get(name)
        pod = copy.deepcopy(pod)
        if before is not None and before["metadata"]["uid"] != pod["metadata"]["uid"]:
            self.delete(name)
            before = None
        self._record("ADDED" if before is None else "MODIFIED", pod, before)
        self.pods[name] = pod

    def delete(self, name: str) -> None:
        """Remove the object."""
        before = self.pods.pop(name)
        self._record("DELETED", copy.deepcopy(before), before)

    def quietly(self, pods: Iterable[Pod]) -> None:
        """Make these the pods without any event, as after a restore or while nobody watched; history is gone."""
        self.pods = {}
        for pod in pods:
            self.version += 1
            self.pods[pod["metadata"]["name"]] = _versioned(pod, self.version)
        self.version += 1
        self.compact()

    def send(self, kind: str, pod: Pod) -> None:
        """One event to every watch, as it is, whatever the pods are."""
        for watch in self._watches:
            watch.lines.put_nowait(_line(kind, pod))

    # -- faults ----------------------------------------------------------------------------------
    def calm(self) -> None:
        """Plan no faults, and break off watches that were silenced."""
        self.bookmark_seconds = BOOKMARK_SECONDS
        self._refusals.clear()
        if any(watch.silent for watch in self._watches):
            self.drop()

    def refuse(self, verb: str, status: int, times: int = 1, **headers: str) -> None:
        """Answer the next lists or watches with an error."""
        self._refusals.append(_Refusal(verb, status, times, headers))

    def compact(self) -> None:
        """Forget history: a watch from an older version is refused with 410."""
        self._history.clear()
        self._oldest = self.version

    def expire(self) -> None:
        """410 as an event in the middle of each watch."""
        status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
        self.send("ERROR", status)

    def silence(self) -> None:
        """The watches that there are deliver nothing from now on and stay open."""
        for watch in self._watches:
            watch.silent = True

    def drop(self) -> None:
        """Break off each watch."""
        for watch in list(self._watches):
            if watch.request is not None and watch.request.transport is not None:
                watch.request.transport.abort()

    def end(self) -> None:
        """End each watch in order, as at its timeout."""
        for watch in self._watches:
            watch.lines.put_nowait(None)

    def garble(self, data: bytes) -> None:
        """Bytes into each watch."""
        for watch in self._watches:
            watch.lines.put_nowait(data)

    @property
    def watching(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    def count(self, verb: str) -> int:
        """Requests of that kind so far."""
        return sum(asked.verb == verb for asked in self.asked)

    # -- HTTP ------------------------------------------------------------------------------------
    async def _serve(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch") == "true" else "list"
        self.asked.append(Asked(verb, dict(request.query), request.headers.get("Authorization")))
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}".lower():
            return _status(401, "Unauthorized")
        for refusal in self._refusals:
            if refusal.verb == verb and refusal.times > 0:
                refusal.times -= 1
                return _status(refusal.status, "as the test wants", refusal.headers)
        if verb == "watch":
            return await self._watch(request)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        selector = request.query.get("labelSelector", "")
        names = sorted(name for name, pod in self.pods.items() if selected(pod, selector))
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or len(names) or 1)
        metadata: dict[str, Any] = {"resourceVersion": str(self.version)}
        if start + limit < len(names):
            metadata |= {"continue": str(start + limit), "remainingItemCount": len(names) - start - limit}
        items = [self.pods[name] for name in names[start : start + limit]]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._oldest:
            return _status(410, f"too old resource version: {since} ({self._oldest})")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        watch = _Watch(request.query.get("labelSelector", ""), request=request)
        for version, kind, pod, before in self._history:
            if version > since:
                self._offer(watch, kind, pod, before)
        self._watches.add(watch)
        try:
            await response.prepare(request)
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", "3600"))):
                while (line := await self._next_line(watch)) is not None:
                    if watch.silent:
                        await asyncio.Event().wait()
                    await response.write(line)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.discard(watch)
        return response

    async def _next_line(self, watch: _Watch) -> bytes | None:
        try:
            async with asyncio.timeout(self.bookmark_seconds):
                return await watch.lines.get()
        except TimeoutError:
            mark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(self.version)}}
            return _line("BOOKMARK", mark)

    def _record(self, kind: str, pod: Pod, before: Pod | None) -> None:
        self.version += 1
        pod["metadata"]["resourceVersion"] = str(self.version)
        frozen = copy.deepcopy(pod)
        self._history.append((self.version, kind, frozen, before))
        for watch in self._watches:
            self._offer(watch, kind, frozen, before)

    def _offer(self, watch: _Watch, kind: str, pod: Pod, before: Pod | None) -> None:
        """The event as a watch with a selector sees it: coming into the selection is ADDED, leaving it DELETED."""
        now = kind != "DELETED" and selected(pod, watch.selector)
        then = before is not None and selected(before, watch.selector)
        if now or then:
            watch.lines.put_nowait(_line(("MODIFIED" if then else "ADDED") if now else "DELETED", pod))


def selected(pod: Pod, selector: str) -> bool:
    """Whether labels fit a selector of `key=value` and `key in (a,b)` terms."""
    labels = pod["metadata"].get("labels") or {}
    for term in re.split(r",(?![^(]*\))", selector):
        if match := re.fullmatch(r"(\S+) in \((.*)\)", term):
            if labels.get(match[1]) not in match[2].split(","):
                return False
        elif term:
            key, _, value = term.partition("=")
            if labels.get(key) != value:
                return False
    return True


def _versioned(pod: Pod, version: int) -> Pod:
    pod = copy.deepcopy(pod)
    pod["metadata"]["resourceVersion"] = str(version)
    return pod


def _line(kind: str, pod: Pod) -> bytes:
    return json.dumps({"type": kind, "object": pod}).encode() + b"\n"


def _status(code: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)
