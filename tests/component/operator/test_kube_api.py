"""What the operator sends to an API server and how it reads refusals, over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from pd_operator.core.observed_kinds import DEPLOYMENTS, PODS, Ref
from pd_operator.shell.api import ApiError
from pd_operator.shell.kube_api import KubeApi
from pd_operator.shell.login import connection_info
from pd_operator.shell.metrics import Metrics

SERVICE = Ref("Service", "models", "qwen-decode")
MANIFEST: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "qwen-decode", "namespace": "models"},
}


class Server:
    """Answers what a test puts in, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.answers: list[web.Response] = []

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.method, request.path_qs, headers, json.loads(text) if text else None))
        return self.answers.pop(0) if self.answers else web.json_response({"metadata": {}})

    def refuse(self, status: int, **more: Any) -> None:
        """The next answer is a Status of the API server."""
        headers = more.pop("headers", {})
        body = {"kind": "Status", "status": "Failure", "code": status, "message": "no", **more}
        self.answers.append(web.json_response(body, status=status, headers=headers))


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "u", "user": {"token": "abc"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(kubeconfig), encoding="ascii")
    monkeypatch.setenv("KUBECONFIG", str(path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    yield made
    await runner.cleanup()


@pytest_asyncio.fixture
async def api(server: Server) -> AsyncIterator[KubeApi]:
    made = await KubeApi.connect(10.0, Metrics())
    yield made
    await made.close()


async def test_an_apply_is_forced_and_meant_for_that_very_object(api: KubeApi, server: Server) -> None:
    await api.apply(MANIFEST, "u1")
    method, path, headers, body = server.requests[0]
    assert (method, path) == (
        "PATCH", "/api/v1/namespaces/models/services/qwen-decode?fieldManager=pd-operator&force=true",
    )  # fmt: skip
    assert headers["content-type"] == "application/apply-patch+yaml"
    assert headers["authorization"] == "Bearer abc"
    assert headers["user-agent"] == "pd-operator"
    assert body == {**MANIFEST, "metadata": {**MANIFEST["metadata"], "uid": "u1"}}
    assert "uid" not in MANIFEST["metadata"]


async def test_an_apply_of_an_absent_object_is_not_forced(api: KubeApi, server: Server) -> None:
    await api.apply(MANIFEST, None)
    assert server.requests[0][1].endswith("?fieldManager=pd-operator&force=false")
    assert server.requests[0][3] == MANIFEST


@pytest.mark.parametrize(("uid", "force"), [("u1", "true"), (None, "false")])
async def test_a_rehearsal_is_the_same_request_without_effect(
    api: KubeApi, server: Server, uid: str | None, force: str
) -> None:
    await api.apply(MANIFEST, uid)
    await api.rehearse(MANIFEST, uid)
    (method, path, _, body), (same, dry, _, again) = server.requests
    assert (same, again) == (method, body)
    assert path.endswith(f"force={force}")
    assert dry == f"{path}&dryRun=All"
    server.refuse(422, message="too large")
    with pytest.raises(ApiError, match="too large"):
        await api.rehearse(MANIFEST, uid)


async def test_a_status_goes_to_its_subresource(api: KubeApi, server: Server) -> None:
    await api.apply_status(Ref("PDDeployment", "models", "qwen"), "u1", {"url": "x"})
    _, path, _, body = server.requests[0]
    assert path.startswith("/apis/pdserving.dev/v1alpha1/namespaces/models/pddeployments/qwen/status?")
    assert body["status"] == {"url": "x"}
    assert body["metadata"]["uid"] == "u1"
    assert "spec" not in body


@pytest.mark.parametrize(("orphan", "policy"), [(False, "Background"), (True, "Orphan")])
async def test_a_deletion_is_meant_for_that_very_object(
    api: KubeApi, server: Server, orphan: bool, policy: str
) -> None:
    await api.delete(SERVICE, "u1", orphan=orphan)
    assert server.requests[0][0] == "DELETE"
    assert server.requests[0][3]["preconditions"] == {"uid": "u1"}
    assert server.requests[0][3]["propagationPolicy"] == policy


async def test_gone_already_is_no_failure(api: KubeApi, server: Server) -> None:
    server.refuse(404)
    await api.delete(SERVICE, "u1", orphan=False)
    server.refuse(404)
    assert await api.get(SERVICE) is None


async def test_lists_are_read_to_the_end(api: KubeApi, server: Server) -> None:
    server.answers += [
        web.json_response({"items": [{"n": 1}], "metadata": {"resourceVersion": "7", "continue": "more"}}),
        web.json_response({"items": [{"n": 2}], "metadata": {"resourceVersion": "7"}}),
    ]
    assert await api.list(PODS, None, "a=b") == ([{"n": 1}, {"n": 2}], 7)
    assert [path for _, path, _, _ in server.requests] == [
        "/api/v1/pods?limit=500&labelSelector=a%3Db",
        "/api/v1/pods?limit=500&labelSelector=a%3Db&continue=more",
    ]
    await api.list(DEPLOYMENTS, "models", "")
    assert server.requests[-1][1] == "/apis/pdserving.dev/v1alpha1/namespaces/models/pddeployments?limit=500"


@pytest.mark.parametrize(
    ("status", "transient"),
    [(400, False), (403, False), (409, True), (422, False), (429, True), (500, False), (503, True), (504, True)],
)
async def test_refusals(api: KubeApi, server: Server, status: int, transient: bool) -> None:
    server.refuse(status, reason="Because")
    with pytest.raises(ApiError) as caught:
        await api.apply(MANIFEST, "u1")
    assert (caught.value.status, caught.value.reason, caught.value.message) == (status, "Because", "no")
    assert caught.value.transient is transient


async def test_retry_after_from_the_header_or_the_body(api: KubeApi, server: Server) -> None:
    server.refuse(429, headers={"Retry-After": "7"})
    server.refuse(429, details={"retryAfterSeconds": 5})
    server.refuse(429)
    waits = []
    for _ in range(3):
        with pytest.raises(ApiError) as caught:
            await api.get(SERVICE)
        waits.append(caught.value.retry_after)
    assert waits == [7.0, 5.0, None]


async def test_a_namespace_that_is_going(api: KubeApi, server: Server) -> None:
    server.refuse(403, details={"causes": [{"reason": "NamespaceTerminating"}]})
    with pytest.raises(ApiError) as caught:
        await api.apply(MANIFEST, None)
    assert caught.value.namespace_is_going


async def test_a_body_that_is_no_status_is_not_repeated(api: KubeApi, server: Server) -> None:
    server.answers.append(web.Response(status=502, text="<html>secret of a proxy</html>"))
    with pytest.raises(ApiError) as caught:
        await api.get(SERVICE)
    assert "secret" not in str(caught.value)
    assert caught.value.transient


async def test_no_answer_at_all(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "elsewhere"
    text = (tmp_path / "kubeconfig").read_text(encoding="ascii")
    address = json.loads(text)["clusters"][0]["cluster"]["server"]
    path.write_text(text.replace(address, "http://127.0.0.1:9"), encoding="ascii")
    monkeypatch.setenv("KUBECONFIG", str(path))
    api = await KubeApi.connect(5.0, Metrics())
    with pytest.raises(ApiError) as caught:
        await api.get(SERVICE)
    assert (caught.value.status, caught.value.transient) == (0, True)
    await api.close()


async def test_kopf_uses_the_same_credentials(server: Server) -> None:
    info = await connection_info()
    assert info.server.startswith("http://127.0.0.1:")
    assert (info.scheme, info.token, info.trust_env, info.proxy_url) == ("Bearer", "abc", False, None)


async def test_a_rotated_token_is_read_again(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("first", encoding="ascii")
    kubeconfig = json.loads((tmp_path / "kubeconfig").read_text(encoding="ascii"))
    kubeconfig["users"][0]["user"] = {"tokenFile": str(token)}
    (tmp_path / "kubeconfig").write_text(json.dumps(kubeconfig), encoding="ascii")
    assert (await connection_info()).token == "first"
    token.write_text("second", encoding="ascii")
    assert (await connection_info()).token == "second"
