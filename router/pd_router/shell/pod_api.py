"""Talking to the Kubernetes API server: credentials, pages of pods, and the lines of a watch.

Separate from the discovery so that everything about the wire is here and what is left is a loop over lists and events.
Credentials, TLS and token refresh are the official client's; its watch is not used, because that resumes in silence
and makes a model object of each pod. Every failure ends as an `ApiFailed` with a word from a closed set.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml

PAGE_PODS = 50
"""Pods per page of a list: about half a megabyte, parsed in a few milliseconds."""
LINE_BYTES = 8 * 1024 * 1024
"""A longer event is no pod: etcd keeps at most 1.5 MB per object."""
REQUEST_SECONDS = 30.0
CONNECT_SECONDS = 10.0
CLOSING_SECONDS = 0.25
"""TLS connections end some rounds of the loop after they were closed; until then their sockets are open."""
_POD_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Trouble(StrEnum):
    """How talking to the API server ended; a metric label."""

    DONE = "done"
    """The watch ended in order, as each does after a while."""
    EXPIRED = "expired"
    """410: what was asked for is too old; list again."""
    STALLED = "stalled"
    LOST = "lost"
    REFUSED = "refused"
    """401 or 403."""
    THROTTLED = "throttled"
    SERVER = "server_error"
    MALFORMED = "malformed"
    CREDENTIALS = "credentials"


class ApiFailed(Exception):
    """A request did not give what it should. `retry_after` is what the server asked for, in seconds."""

    def __init__(self, trouble: Trouble, detail: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{trouble.value}: {detail}" if detail else trouble.value)
        self.trouble = trouble
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Page:
    """Some pods, and the version of the whole list."""

    pods: list[Mapping[str, Any]]
    version: str


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""

    kind: str
    pod: Mapping[str, Any]


class PodApi:
    """The pods of one namespace that a label selector selects."""

    def __init__(self, namespace: str, selector: str, kubeconfig: str, account: Path = _POD_ACCOUNT) -> None:
        self._namespace = namespace
        self._selector = selector
        self._kubeconfig = kubeconfig
        self._account = account
        self._client: Any = None
        self._closed_at = -math.inf

    async def connect(self) -> None:
        """Read credentials anew and forget all connections. Raises ApiFailed; connects to nothing yet."""
        # Half a second and 26 MB: only a router that discovers pods pays for it.
        from kubernetes.aio import client
        from kubernetes.aio.config.config_exception import ConfigException

        await self.close()
        settings: Any = client.Configuration()
        # A proxy for the application's traffic is none for the API server; a kubeconfig's proxy-url still counts.
        settings.client_session_kwargs = {"trust_env": False}
        try:
            await self._load(settings)
            self._client = client.ApiClient(settings)
        except yaml.YAMLError as error:
            raise ApiFailed(Trouble.CREDENTIALS, "the kubeconfig file is no YAML") from error  # its text may be secret
        except (TypeError, KeyError, AttributeError) as error:
            raise ApiFailed(Trouble.CREDENTIALS, "the file has not the shape of a kubeconfig") from error
        except (ConfigException, OSError, ValueError) as error:
            raise ApiFailed(Trouble.CREDENTIALS, " ".join(str(error).split())) from error
        self._client.user_agent = "pd-router"

    async def _load(self, settings: Any) -> None:
        from kubernetes.aio import config

        account: Any = config.incluster_config.InClusterConfigLoader
        kubeconfig: Any = config.load_kube_config
        if not self._kubeconfig and os.environ.get("KUBERNETES_SERVICE_HOST"):
            account(str(self._account / "token"), str(self._account / "ca.crt")).load_and_set(settings)
            return
        await kubeconfig(config_file=self._kubeconfig_paths(), client_configuration=settings, persist_config=False)

    def _kubeconfig_paths(self) -> str:
        """Files to read, as in $KUBECONFIG. Raises OSError when there are none."""
        paths = self._kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        if not any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
            raise OSError(f"there is no file {paths}" + ("" if self._kubeconfig else ", and this is no pod"))
        return paths

    async def close(self) -> None:
        """Drop all connections. Whoever cut an earlier call short waits for the rest of it."""
        now = asyncio.get_running_loop().time
        if self._client is not None:
            client, self._client = self._client, None
            self._closed_at = now()
            await client.close()
        await asyncio.sleep(max(0.0, self._closed_at + CLOSING_SECONDS - now()))

    async def pages(self) -> AsyncGenerator[Page, None]:
        """All pods as they are now, page by page. Raises ApiFailed."""
        more = ""
        while True:
            query = [("limit", str(PAGE_PODS))]
            if more:
                query.append(("continue", more))
            async with self._get(
                query, aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=CONNECT_SECONDS)
            ) as got:
                try:
                    raw = await got.read()
                except (aiohttp.ClientError, OSError) as error:
                    raise ApiFailed(Trouble.LOST, str(error)) from error
            body = _object(raw)
            about, items = body.get("metadata"), body.get("items")
            if not isinstance(about, dict) or not isinstance(items or [], list):
                raise ApiFailed(Trouble.MALFORMED, "the answer is no list of pods")
            yield Page([item for item in items or [] if isinstance(item, dict)], str(about.get("resourceVersion", "")))
            more = str(about.get("continue") or "")
            if not more:
                return

    async def watch(self, version: str, seconds: float, stall: float) -> AsyncGenerator[Event, None]:
        """Events after `version` until the server ends the watch, which it is asked to do after `seconds`.

        Raises ApiFailed, also when nothing came for `stall` seconds.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", str(max(1, round(seconds)))),
        ]
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=stall)
        async with self._get(query, limits) as got:
            rest = b""
            try:
                async for data in got.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    if len(rest) > LINE_BYTES:
                        raise ApiFailed(Trouble.MALFORMED, f"an event is longer than {LINE_BYTES} bytes")
                    for line in lines:
                        if line.strip():
                            yield _event(line)
            except TimeoutError as error:
                raise ApiFailed(Trouble.STALLED, f"the watch was silent for {stall:g} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise ApiFailed(Trouble.LOST, str(error)) from error
            if rest.strip():
                raise ApiFailed(Trouble.LOST, "the watch ended in the middle of an event")

    @contextlib.asynccontextmanager
    async def _get(
        self, query: list[tuple[str, str]], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request whose answer is 200. Raises ApiFailed."""
        if self._client is None:
            raise ApiFailed(Trouble.CREDENTIALS, "there are none")
        method, url, headers, *_ = await self._client.param_serialize(
            "GET",
            "/api/v1/namespaces/{namespace}/pods",
            path_params={"namespace": self._namespace},
            query_params=[("labelSelector", self._selector), *query],
            header_params={"Accept": "application/json"},
            auth_settings=["BearerToken"],
        )
        try:
            got = (await self._client.call_api(method, url, headers, _request_timeout=limits)).response
        except TimeoutError as error:
            raise ApiFailed(Trouble.LOST, "the API server does not answer") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiFailed(Trouble.LOST, str(error)) from error
        try:
            if got.status != 200:
                raise await _refusal(got)
            yield got
        finally:
            if got.connection is not None and got.connection.transport is not None:
                # Closing TLS in order waits for the server's farewell, and a server that is stuck says none.
                got.connection.transport.abort()
            got.close()


async def _refusal(got: aiohttp.ClientResponse) -> ApiFailed:
    try:
        message = str(_object(await got.content.read(65536)).get("message", ""))[:300]
    except (aiohttp.ClientError, OSError, TimeoutError, ApiFailed):
        message = ""
    after = got.headers.get("Retry-After", "")
    return _failure(got.status, message, float(after) if after.isascii() and after.isdigit() else 0.0)


def _failure(status: object, message: str, retry_after: float = 0.0) -> ApiFailed:
    trouble = {
        401: Trouble.REFUSED,
        403: Trouble.REFUSED,
        410: Trouble.EXPIRED,
        429: Trouble.THROTTLED,
    }.get(status if isinstance(status, int) else 0, Trouble.SERVER)
    return ApiFailed(trouble, f"{status} {message}".strip(), retry_after)


def _event(line: bytes) -> Event:
    parsed = _object(line)
    kind, pod = parsed.get("type"), parsed.get("object")
    if not isinstance(kind, str) or not isinstance(pod, dict):
        raise ApiFailed(Trouble.MALFORMED, "a line of the watch is no event")
    if kind == "ERROR":
        raise _failure(pod.get("code"), str(pod.get("message", ""))[:300])
    return Event(kind, pod)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiFailed(Trouble.MALFORMED, "the answer is no JSON") from error
    if not isinstance(parsed, dict):
        raise ApiFailed(Trouble.MALFORMED, "the answer is no object")
    return parsed
