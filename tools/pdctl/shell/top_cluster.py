"""Routers and engines of a PDDeployment in a cluster, read through the API server's port forwarding.

Not through its proxy: a network policy may refuse connections from outside, and a forwarded one begins in the pod.
Separate from `top_source` because only this needs the Kubernetes client, which takes half a second to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import os
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, ApiException, Configuration, CoreV1Api
from kubernetes.aio.config.config_exception import ConfigException

from pd_wire.names import LABEL_DEPLOYMENT, LABEL_ROLE
from pdctl.core.exposition import sum_samples
from pdctl.core.top_window import Look
from pdctl.shell.top_source import KV_USAGE, Reading, SourceError, parse_fleet, parse_look

ROUTER: Final = "router"
ADMIN_PORT: Final = "admin"
ENGINE_PORT: Final = "http"
SECONDS: Final = 10.0
ENGINE_SECONDS: Final = 3.0
AT_ONCE: Final = 8
PROTOCOL: Final = "v4.channel.k8s.io"
DATA, ERROR = 0, 1
"""Channels of the one forwarded port. The first frame on each is the port's number."""

Result = TypeVar("Result")


class NotForwarded(Exception):
    """A pod that can't be read, in a few words."""


@dataclass(frozen=True, slots=True)
class _Pod:
    name: str
    role: str
    port: int


@contextlib.asynccontextmanager
async def open_cluster(
    kubeconfig: str, context: str, namespace: str, name: str, ask_engines: bool
) -> AsyncIterator[ClusterSource]:
    """A source with the credentials of a kubeconfig, $KUBECONFIG or ~/.kube/config. Raises SourceError."""
    paths = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):  # noqa: ASYNC240
        raise SourceError(f"there is no kubeconfig {paths} (--kubeconfig, $KUBECONFIG)")
    # The generated classes are typed in part.
    client: Any = ApiClient(await _credentials(paths, context))
    try:
        yield ClusterSource(client, namespace, name, ask_engines=ask_engines)
    finally:
        await client.close()


async def _credentials(paths: str, context: str) -> Configuration:
    settings = Configuration(client_session_kwargs={"trust_env": False})
    load: Any = config.load_kube_config
    try:
        await load(config_file=paths, context=context or None, client_configuration=settings, persist_config=False)
    except yaml.YAMLError:
        raise SourceError(f"the kubeconfig {paths} is no YAML") from None  # what it says may be secret
    except (ConfigException, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SourceError(f"the kubeconfig {paths} can't be used: {' '.join(str(error).split())}") from None
    return settings


class ClusterSource:
    """One PDDeployment. Routers come and go; each reading looks for them anew."""

    def __init__(self, client: Any, namespace: str, name: str, *, ask_engines: bool) -> None:
        self._client = client
        self._namespace, self._name = namespace, name
        self._ask_engines = ask_engines
        self._free = asyncio.Semaphore(AT_ONCE)

    async def read(self) -> Reading:
        """Look once. Raises SourceError."""
        pods = await self._pods()
        routers = [pod for pod in pods if pod.role == ROUTER]
        if not routers:
            raise SourceError(
                f"no router of PDDeployment {self._namespace}/{self._name} is running: see "
                f"kubectl -n {self._namespace} describe pdd {self._name}"
            )
        pages = await asyncio.gather(*(self._router(pod) for pod in routers))
        engines = [pod for pod in pods if pod.role != ROUTER] if self._ask_engines else []
        usage = await asyncio.gather(*(self._usage(pod) for pod in engines))
        return Reading(
            {pod.name: look for pod, (look, _) in zip(routers, pages, strict=True)},
            [fleet for _, fleet in pages],
            {pod.name: one for pod, one in zip(engines, usage, strict=True)},
        )

    async def _pods(self) -> list[_Pod]:
        selector = f"{LABEL_DEPLOYMENT}={self._name}"
        try:
            core: Any = CoreV1Api(self._client)
            found = await self._within(SECONDS, core.list_namespaced_pod(self._namespace, label_selector=selector))
        except ApiException as error:
            needs = f"; it needs the right to list pods in {self._namespace}" if error.status == 403 else ""
            raise SourceError(f"the API server refuses to list pods: {error.status} {error.reason}{needs}") from None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise SourceError(f"the API server can't be reached: {str(error) or 'no answer'}") from None
        pods = []
        for pod in found.items:
            role = (pod.metadata.labels or {}).get(LABEL_ROLE, "")
            wanted = ADMIN_PORT if role == ROUTER else ENGINE_PORT
            ports = [port for one in pod.spec.containers for port in one.ports or () if port.name == wanted]
            if ports and pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None:
                pods.append(_Pod(pod.metadata.name, role, ports[0].container_port))
        return pods

    async def _router(self, pod: _Pod) -> tuple[Look, list[dict[str, Any]]]:
        where = f"pod {pod.name}, port {pod.port}"
        try:
            page = await self._get(pod, "/metrics", SECONDS)
            return parse_look(page, where), parse_fleet(await self._get(pod, "/debug/fleet", SECONDS), where)
        except NotForwarded as error:
            raise SourceError(f"{where}: {error}") from None

    async def _usage(self, pod: _Pod) -> float | None:
        try:
            return sum_samples(await self._get(pod, "/metrics", ENGINE_SECONDS), KV_USAGE)
        except NotForwarded:
            return None

    async def _get(self, pod: _Pod, path: str, seconds: float) -> str:
        """The body of a page. Raises NotForwarded."""
        try:
            async with self._free:
                raw = await self._within(seconds, self._exchange(pod, path))
        except TimeoutError:
            raise NotForwarded(f"no answer within {seconds:g} s") from None
        except (ApiException, aiohttp.WSServerHandshakeError) as error:
            needs = "; it needs get and create on pods/portforward" if error.status == 403 else ""
            raise NotForwarded(f"the API server refuses to forward: {error.status}{needs}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotForwarded(f"the API server can't be reached: {error}") from None
        return _body(raw)

    async def _exchange(self, pod: _Pod, path: str) -> bytes:
        settings = self._client.configuration
        bearer = await settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        # The client that listed the pods: it has the certificates.
        opening = self._client.rest_client.pool_manager.ws_connect(
            f"{settings.host}/api/v1/namespaces/{self._namespace}/pods/{pod.name}/portforward?ports={pod.port}",
            protocols=(PROTOCOL,),
            headers={"authorization": bearer} if bearer else {},
            proxy=settings.proxy or None,
        )
        seen = b""
        begun: set[int] = set()
        async with opening as socket:
            # HTTP/1.0: the end of the answer is the end of the connection.
            await socket.send_bytes(bytes([DATA]) + f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                    break
                channel, data = message.data[0], message.data[1:]
                if channel not in begun:
                    begun.add(channel)
                elif channel == ERROR:
                    raise NotForwarded(" ".join(data.decode("utf-8", "replace").split()))
                else:
                    seen += data
                    if _complete(seen):
                        break
        return seen

    @staticmethod
    async def _within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
        async with asyncio.timeout(seconds):
            return await work


class _Received:
    """What `http.client` reads from: bytes that are there already."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object, **__: object) -> io.BytesIO:
        """All of them."""
        return io.BytesIO(self._raw)


def _complete(raw: bytes) -> bool:
    """Whether the answer says its length and is that long."""
    head, blank, body = raw.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n")[1:] if blank else ():
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(body) >= int(value)
    return False


def _body(raw: bytes) -> str:
    response = http.client.HTTPResponse(cast("Any", _Received(raw)))
    try:
        response.begin()
        text = response.read().decode("utf-8")
    except (http.client.HTTPException, ValueError) as error:
        raise NotForwarded(f"no HTTP answer: {type(error).__name__}") from None
    if response.status != 200:
        raise NotForwarded(f"status {response.status}")
    return text
