"""`ClusterApi` over the official client's asyncio half: no thread is ever blocked, there is one connection pool, and
bound tokens are read again by the client itself.

Raw dictionaries go both ways. The client's models would send nulls and defaults and so take ownership of fields that
are not ours.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import aiohttp
from kubernetes.aio.client import ApiClient

from pd_operator.core.observed import HAND_OVER_MANAGER, MANAGER, REPAIR_MANAGER
from pd_operator.core.observed_kinds import DEPLOYMENTS, EVENTS, Kind, Ref, kind_named
from pd_operator.shell.api import ApiError
from pd_operator.shell.login import load_configuration
from pd_operator.shell.metrics import Metrics

logger = logging.getLogger(__name__)

_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
_JSON_PATCH: Final = "application/json-patch+json"
_MESSAGE_LIMIT: Final = 1000


class KubeApi:
    """One client for the whole process."""

    def __init__(self, client: ApiClient, timeout: float, metrics: Metrics) -> None:
        self._client = client
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._metrics = metrics

    @classmethod
    async def connect(cls, request_timeout: float, metrics: Metrics) -> KubeApi:
        """Read the credentials that the process was given; makes no call yet."""
        client = ApiClient(await load_configuration())
        client.user_agent = MANAGER
        return cls(client, request_timeout, metrics)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def get(self, ref: Ref) -> Mapping[str, Any] | None:
        """See ClusterApi."""
        try:
            return await self._call("GET", _path(kind_named(ref.kind), ref.namespace, ref.name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def alive(self, ref: Ref, uid: str) -> bool:
        """See ClusterApi. A list of one, since the operator has no other use for the right to get PDDeployments."""
        query = {"fieldSelector": f"metadata.name={ref.name}"}
        page = await self._call("GET", _path(kind_named(ref.kind), ref.namespace), query)
        return any(item["metadata"].get("uid") == uid for item in page.get("items") or ())

    async def list(self, kind: Kind, namespace: str | None, label_selector: str) -> tuple[list[Mapping[str, Any]], int]:
        """See ClusterApi. In pages, so that no single answer is huge."""
        items: list[Mapping[str, Any]] = []
        query = {"limit": "500"} | ({"labelSelector": label_selector} if label_selector else {})
        while True:
            page = await self._call("GET", _path(kind, namespace), query)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, int(metadata.get("resourceVersion") or 0)
            query["continue"] = metadata["continue"]

    async def apply(self, manifest: Mapping[str, Any], uid: str | None) -> Mapping[str, Any]:
        """See ClusterApi."""
        return await self._apply(manifest, uid, {})

    async def rehearse(self, manifest: Mapping[str, Any], uid: str | None) -> None:
        """See ClusterApi."""
        await self._apply(manifest, uid, {"dryRun": "All"})

    async def hand_over(self, manifest: Mapping[str, Any], uid: str) -> None:
        """See ClusterApi. Without force: when the value has changed meanwhile, the server says Conflict."""
        metadata = manifest["metadata"]
        body = {**manifest, "metadata": {**metadata, "uid": uid}}
        path = _path(kind_named(manifest["kind"]), metadata["namespace"], metadata["name"])
        await self._call("PATCH", path, {"fieldManager": HAND_OVER_MANAGER, "force": "false"}, body, _APPLY)

    async def patch(self, ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """See ClusterApi. Replacing the version makes the server compare it: Conflict when it is another one."""
        path = _path(kind_named(ref.kind), ref.namespace, ref.name)
        guard = {"op": "replace", "path": "/metadata/resourceVersion", "value": version}
        body = [guard, *(dict(one) for one in operations)]
        return await self._call("PATCH", path, {"fieldManager": REPAIR_MANAGER}, body, _JSON_PATCH)

    async def apply_status(self, ref: Ref, uid: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """See ClusterApi."""
        body = {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": ref.kind,
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": uid},
            "status": dict(status),
        }
        path = f"{_path(DEPLOYMENTS, ref.namespace, ref.name)}/status"
        return await self._call("PATCH", path, {"fieldManager": MANAGER, "force": "true"}, body, _APPLY)

    async def delete(self, ref: Ref, uid: str, *, orphan: bool) -> bool:
        """See ClusterApi."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Orphan" if orphan else "Background",
        }
        try:
            await self._call("DELETE", _path(kind_named(ref.kind), ref.namespace, ref.name), {}, body, _JSON)
        except ApiError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def events_about(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """See ClusterApi."""
        query = {"fieldSelector": f"involvedObject.uid={uid}", "limit": "500"}
        page = await self._call("GET", _path(EVENTS, namespace), query)
        return page.get("items") or ()

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """See ClusterApi."""
        await self._call("POST", _path(EVENTS, namespace), {}, dict(event), _JSON)

    async def _apply(self, manifest: Mapping[str, Any], uid: str | None, more: Mapping[str, str]) -> Mapping[str, Any]:
        metadata = manifest["metadata"]
        body = {**manifest, "metadata": {**metadata, "uid": uid}} if uid else dict(manifest)
        path = _path(kind_named(manifest["kind"]), metadata["namespace"], metadata["name"])
        # Without a uid the object was absent a moment ago: what somebody else has made since must not be overwritten.
        query = {"fieldManager": MANAGER, "force": "true" if uid else "false", **more}
        return await self._call("PATCH", path, query, body, _APPLY)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        content_type: str = _JSON,
    ) -> dict[str, Any]:
        status = 0
        try:
            request = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": _JSON, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._client.call_api(*request, _request_timeout=self._timeout)
            status = response.status
            data = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(
                0, "Unreachable", f"no answer from the API server: {error or type(error).__name__}"
            ) from error
        finally:
            self._metrics.api_calls.labels(method, str(status)).inc()
        if 200 <= status < 300:
            answer = json.loads(data)
            assert isinstance(answer, dict)
            return answer
        raise _error(status, data, response.headers.get("Retry-After"))


def _path(kind: Kind, namespace: str | None, name: str | None = None) -> str:
    path = kind.root
    if namespace is not None:
        path += f"/namespaces/{quote(namespace, safe='')}"
    path += f"/{kind.plural}"
    return f"{path}/{quote(name, safe='')}" if name is not None else path


def _error(status: int, data: bytes, retry_after: str | None) -> ApiError:
    """The server's answer as an exception. Foreign bodies (a proxy's HTML) are not repeated."""
    try:
        answer = json.loads(data)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or answer.get("kind") != "Status":
        answer = {}
    details = answer.get("details") or {}
    wait = str(retry_after or details.get("retryAfterSeconds") or "")
    return ApiError(
        status,
        str(answer.get("reason", "")),
        str(answer.get("message", ""))[:_MESSAGE_LIMIT] or f"HTTP {status}",
        retry_after=float(wait) if wait.isdigit() else None,
        causes=tuple(str(cause.get("reason", "")) for cause in details.get("causes") or ()),
    )
