"""The endpoint for leases inside vLLM's API server: loaded as vLLM loads it, in front of real side channels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

from support.vllm_turns import SideChannel, retention, supported, turn
from support.waiting import until

LEASED = {"extra": {"pd_retention": "Leased"}}
PATH = "/pd/v1/leases"
UNKNOWN = "ab" * 16


def case_a_router_prolongs_and_ends_leases(lab: Any) -> None:
    if not supported():
        return
    scheduler = lab.scheduler("decode", **LEASED)
    token = _token(turn(lab, scheduler))
    with SideChannel(scheduler) as channel:
        server = _Server(channel["remote_port"])
        assert server.post([(token, 600), (UNKNOWN, 60), (token, 30)]) == (200, [600, 0, 30])
        (held,) = retention(scheduler)._leases.by_value(0.0)
        assert held.prolonged
        assert server.woken == 0, "nothing to be done at once"
        assert server.post([(UNKNOWN, 60), (token, 0)]) == (200, [0, 0])
        assert server.woken == 1
        assert server.post([(token, 60), (token, 0), (UNKNOWN, 0)]) == (200, [0, 0, 0])
        assert server.woken == 1, "nothing that was held has ended, and anybody may ask for that"
    assert scheduler.has_requests()


def case_each_rank_of_this_server_is_told(lab: Any) -> None:
    if not supported():
        return
    schedulers = [lab.scheduler("decode", **LEASED) for _ in range(2)]
    tokens = [_token(turn(lab, scheduler)) for scheduler in schedulers]
    with contextlib.ExitStack() as open_ones:
        first = _neighbours(schedulers, open_ones)
        server = _Server(first - 3, index=3, ranks=2)
        wanted = [(tokens[1], 7), (UNKNOWN, 8), (tokens[0], 9)]
        assert server.post(wanted) == (200, [7, 0, 9])


def case_an_engine_without_leases_holds_none(lab: Any) -> None:
    scheduler = lab.scheduler("decode")
    with SideChannel(scheduler) as channel:
        assert _Server(channel["remote_port"]).post([(UNKNOWN, 60), (UNKNOWN, 0)]) == (200, [0, 0])


def case_nobody_waits_longer_for_an_engine_that_is_silent(lab: Any) -> None:
    import socket

    from pd_connector.shell import lease_api

    with socket.socket() as silent, mock.patch.object(lease_api, "LIMIT_SECONDS", 0.2):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        status, error = _Server(silent.getsockname()[1]).send(_body([(UNKNOWN, 60)]))
    assert (status, error["error"]["code"]) == (503, 503)
    assert "did not answer" in error["error"]["message"]


def case_more_requests_than_sockets_wait_for_their_turn(lab: Any) -> None:
    from pd_connector.shell import lease_api

    if not supported():
        return
    scheduler = lab.scheduler("decode", **LEASED)
    token = _token(turn(lab, scheduler))
    with SideChannel(scheduler) as channel, mock.patch.object(lease_api, "LIMIT_SECONDS", 60):
        answers = _Server(channel["remote_port"]).send_all([_body([(token, 600)])] * 2000)
    assert [(status, body["leases"][0]["seconds"]) for status, body, _ in answers] == [(200, 600)] * 2000


def case_whoever_waits_too_long_for_a_turn_is_told_so(lab: Any) -> None:
    import socket

    from pd_connector.shell import lease_api

    with socket.socket() as silent, mock.patch.object(lease_api, "LIMIT_SECONDS", 0.2):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        answers = _Server(silent.getsockname()[1]).send_all([_body([(UNKNOWN, 60)])] * 40)
    assert {(status, headers[b"retry-after"]) for status, _, headers in answers} == {(503, b"1")}
    told = [body["error"]["message"] for _, body, _ in answers]
    assert sum("too many requests" in message for message in told) == 40 - lease_api.AT_ONCE
    assert sum("did not answer" in message for message in told) == lease_api.AT_ONCE


def case_what_is_malformed_is_refused_with_its_field(lab: Any) -> None:
    server = _Server(1)
    for body, param in (
        (b"{", None),
        (b"{}", "leases"),
        (_body([("x", 1)]), "leases[0].token"),
        (_body([(UNKNOWN, 1), (UNKNOWN, 3601)]), "leases[1].seconds"),
    ):
        status, error = server.send(body)
        assert (status, error["error"]["param"], error["error"]["code"]) == (400, param, 400)
        assert sorted(error["error"]) == ["code", "message", "param", "type"]
    assert server.send(_body([(UNKNOWN, 1)]), method="GET")[0] == 405
    assert server.send(_body([(UNKNOWN, 1)]) + b" " * (128 << 10))[0] == 413
    assert server.send(b"", leaves=True) == (None, None)
    assert server.woken == 0


def case_every_other_path_is_vllms(lab: Any) -> None:
    server = _Server(1)
    assert server.send(b"{}", path="/v1/leases")[0] == 401, "vLLM asks for its key"
    assert server.send(b"{}", path="/pd/v1/leases/x")[0] == 404
    assert server.send(b"{}", path=f"/root{PATH}", root_path="/root")[0] == 400


def case_an_idle_engine_is_woken_for_leases_that_run_out(lab: Any) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from pd_connector.shell import lease_api

    assert asyncio.iscoroutinefunction(AsyncLLM.is_sleeping)
    server = _Server(1)
    with mock.patch.object(lease_api, "WAKE_SECONDS", 0.01):
        server.until(lambda: server.woken > 3)
        server.dead = True
        server.until(lambda: server.refused > 3)


# --- parts ------------------------------------------------------------------------------------------


class _Server:
    """vLLM's application with the endpoint, and an engine that counts how often it is woken."""

    def __init__(self, port: int, index: int = 0, ranks: int = 1) -> None:
        from fastapi import FastAPI
        from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

        anything = {"allowed_origins": ["*"], "allowed_methods": ["*"], "allowed_headers": ["*"]}
        arguments = SimpleNamespace(
            **anything,
            allow_credentials=False,
            api_key=["secret"],
            enable_request_id_headers=False,
            middleware=["pd_connector.shell.lease_api.LeaseApi"],
        )
        self.port = port
        self.woken = self.refused = 0
        self.dead = False
        self.app = FastAPI()
        init_entrypoints_middleware(arguments, self.app, ("generate",))
        parallel = SimpleNamespace(data_parallel_index=index, data_parallel_size_local=ranks)
        self.app.state.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.app.state.engine_client = self

    async def is_sleeping(self) -> bool:
        if self.dead:
            self.refused += 1
            raise RuntimeError("dead")
        self.woken += 1
        return False

    def post(self, items: list[tuple[str, int]]) -> tuple[int, list[int]]:
        """Status and seconds left; the answer's tokens are those of the request."""
        status, answer = self.send(_body(items))
        assert [item["token"] for item in answer["leases"]] == [token for token, _ in items]
        return status, [item["seconds"] for item in answer["leases"]]

    def send(self, body: bytes, *, leaves: bool = False, **scope: Any) -> tuple[Any, Any]:
        """One request while the server runs."""
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": body[:50], "more_body": True}]
        parts.append({"type": "http.disconnect"} if leaves else {"type": "http.request", "body": body[50:]})

        async def receive() -> Any:
            return parts.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        async def request() -> None:
            wanted = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b"", **scope}
            await self.app(wanted, receive, send)
            await asyncio.sleep(0.05)

        with self._environment():
            asyncio.run(self._running(request()))
        if not sent:
            return None, None
        return sent[0]["status"], json.loads(sent[1]["body"])

    def send_all(self, bodies: list[bytes]) -> list[tuple[int, Any, dict[bytes, bytes]]]:
        """Many requests at once; status, body and headers of each."""

        async def one(body: bytes) -> tuple[int, Any, dict[bytes, bytes]]:
            sent: list[dict[str, Any]] = []

            async def receive() -> Any:
                return {"type": "http.request", "body": body}

            async def send(message: Any) -> None:
                sent.append(message)

            wanted = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
            await self.app(wanted, receive, send)
            return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])

        answers: list[Any] = []

        async def all_of_them() -> None:
            answers.extend(await asyncio.gather(*map(one, bodies)))

        with self._environment():
            asyncio.run(self._running(all_of_them()))
        return answers

    def until(self, reached: Any) -> None:
        """Let the server run until something is so."""

        async def look() -> bool:
            return bool(reached())

        asyncio.run(self._running(until(look, 30)))

    async def _running(self, work: Any) -> None:
        """The server's whole life, with work in it. Made anew, since each of them has an event loop of its own."""
        self.app.middleware_stack = None
        ends, started = asyncio.Event(), asyncio.Event()

        async def receive() -> Any:
            if not started.is_set():
                return {"type": "lifespan.startup"}
            await ends.wait()
            return {"type": "lifespan.shutdown"}

        async def send(message: Any) -> None:
            if message["type"] == "lifespan.startup.complete":
                started.set()

        life = asyncio.create_task(self.app({"type": "lifespan", "app": self.app}, receive, send))
        await started.wait()
        try:
            await work
        finally:
            ends.set()
            await life

    def _environment(self) -> Any:
        change = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}
        return mock.patch.dict(os.environ, change)


def _token(handle: dict[str, Any]) -> str:
    from pd_wire import lease

    return str(lease.parse(handle["pd_lease"]).token)


def _body(items: list[tuple[str, int]]) -> bytes:
    return json.dumps({"leases": [{"token": token, "seconds": seconds} for token, seconds in items]}).encode()


def _neighbours(schedulers: list[Any], open_ones: contextlib.ExitStack) -> int:
    """Open the side channels at ports in a row; returns the first."""
    for _ in range(20):
        first = open_ones.enter_context(SideChannel(schedulers[0]))["remote_port"]
        try:
            open_ones.enter_context(SideChannel(schedulers[1], first + 1))
        except OSError:
            open_ones.pop_all().close()
            continue
        return int(first)
    raise AssertionError("no two free ports in a row")
