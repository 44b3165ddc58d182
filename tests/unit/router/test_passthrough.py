"""The endpoints with one engine: what goes to it, and what of its errors comes back."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.passed_health import PassedHealth
from pd_router.core.placement import Loads
from pd_router.core.retry_budget import RetryBudget
from pd_router.core.settings import Timeouts
from pd_router.shell.admission import Admission
from pd_router.shell.context import Context
from pd_router.shell.exchange import Address, Failure, LegError
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.metrics import Metrics
from pd_router.shell.passthrough import pass_through
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from support.canned_leg import CannedLeg

OK = (200, b'{"tokens":[1]}')
FAULT = (500, b'{"error":{"message":"CUDA error","code":500}}')
LOADING = (503, b'{"error":{"message":"loading","code":503}}')


class _Exchange(CannedLeg):
    """One answer, or a failure where the head is waited for."""

    failure: LegError | None = None

    async def head(self) -> int:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return self.status

    def abort(self) -> None:
        pass


class _Engines:
    """A context with engines that answer as `says` has it (port to answer or failure), and what clients got."""

    def __init__(self, count: int = 1, max_inflight: int = 10, max_queue: int = 0) -> None:
        self.says: Callable[[int], tuple[int, bytes] | Failure] = lambda _port: OK
        self.metrics = Metrics()
        self.fleet = Fleet(self.metrics, frozenset(), lambda _key: 0, lambda _member: None)
        for port in range(1, count + 1):
            self.fleet.add(Member(f"e{port}", "decode", Address("e", port), ""))
            self.fleet.set_ready(f"e{port}", True)
        self.admission = Admission(max_inflight, max_queue, 1.0, self.metrics)
        self.settings = SimpleNamespace(timeouts=Timeouts())
        self.loads, self.passed, self.retries = Loads(), PassedHealth(), RetryBudget(0.2)
        self.guard = SimpleNamespace(is_own_fault=lambda _status: False)
        self.pool = self
        self.time = 0.0
        self.asked: list[tuple[int, bytes, bytes]] = []
        self.anew: list[bool] = []
        self.running = self.most = 0

    def now(self) -> float:
        return self.time

    def member(self, key: str) -> Member | None:
        return self.fleet.member(key)

    def request_id(self, _headers: object) -> str:
        return "id"

    def suspect(self, member: Member, *, gone: bool) -> None:
        self.fleet.set_ready(member.key, not gone)

    async def request(
        self, address: Address, head: bytes, body: bytes, _within: float, *, anew: bool = False
    ) -> _Exchange:
        self.asked.append((address.port, head, body))
        self.anew.append(anew)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        said = self.says(address.port)
        if said is Failure.CONNECT:
            raise LegError(Failure.CONNECT)
        headers = [(b"content-type", b"text/html"), (b"retry-after", b"7"), (b"x-engine-id", b"SECRET")]
        if isinstance(said, Failure):
            exchange = _Exchange(0, b"", headers)
            exchange.failure = LegError(said)
            return exchange
        return _Exchange(*said, headers)

    def ports(self) -> list[int]:
        return [port for port, _, _ in self.asked]

    def counts(self, name: str) -> dict[str, float]:
        """Samples of a metric that are not 0, by their label values."""
        return {
            ",".join(sample.labels.values()): sample.value
            for metric in self.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.value
        }


class _Client:
    def __init__(self) -> None:
        self.gone = self.started = self.finished = False
        self.on_gone: Callable[[], None] | None = None
        self.answer: tuple[int, dict[bytes, bytes], bytes] = (0, {}, b"")

    def send(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.finished = True
        self.answer = (status, dict(headers), body)

    def send_error(self, error: ApiError, headers: Any = (), *, body: bytes | None = None) -> None:
        self.send(error.status, list(headers), error.body() if body is None else body)


async def send(engines: _Engines, client: _Client, body: bytes = b"{}", path: str = "/tokenize") -> None:
    method = "GET" if path == "/v1/models" else "POST"
    request = SimpleNamespace(
        method=method, path=f"{path}?kv_transfer_params=evil", headers={}, body=body, tenant=None, arrived=0.0
    )
    await pass_through(cast(Context, engines), path, cast(Request, request), cast(Responder, client))


def ask(engines: _Engines, body: bytes = b"{}", path: str = "/tokenize") -> tuple[int, dict[bytes, bytes], Any]:
    client = _Client()
    asyncio.run(send(engines, client, body, path))
    status, headers, raw = client.answer
    return status, headers, json.loads(raw)


def one(status: int, raw: bytes) -> _Engines:
    engines = _Engines()
    engines.says = lambda _port: (status, raw)
    return engines


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (422, 422), (429, 429), (500, 502), (503, 503)])
@pytest.mark.parametrize(
    "raw", [b"<html>SECRET</html>", b'{"detail":"kv_transfer_params SECRET"}', b'{"x":{"kv_transfer_params":"SECRET"}}']
)
def test_an_engines_error_comes_back_in_openais_shape_and_tells_nothing(status: int, seen: int, raw: bytes) -> None:
    got, headers, answer = ask(one(status, raw))
    assert got == seen
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert "SECRET" not in str(answer) + str(headers)
    if 400 <= status < 500:
        assert headers == {b"content-type": b"application/json", b"retry-after": b"7", b"x-request-id": b"id"}


def test_a_clients_params_and_query_do_not_go_out_and_integers_keep_their_size() -> None:
    engine = one(200, b'{"tokens":[1]}')
    big = 2**70
    body = {"prompt": "x", "messages": [{"n": big, "kv_transfer_params": {"remote_host": "evil"}}]}
    assert ask(engine, json.dumps(body).encode())[2] == {"tokens": [1]}
    [(_, head, sent)] = engine.asked
    assert head.startswith(b"POST /tokenize HTTP/1.1\r\n")
    assert b"evil" not in head + sent
    assert json.loads(sent) == {"prompt": "x", "messages": [{"n": big}]}


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 2000 + b"]" * 2000, b'{"a":"\\ud800"}'])
def test_what_is_no_json_is_refused_here(body: bytes) -> None:
    engine = one(200, b"{}")
    assert ask(engine, body)[0] == 400
    assert engine.asked == []
    assert engine.counts("pd_router_requests_total") == {"/tokenize,400": 1}


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (429, "rate_limit_error")])
def test_errors_of_the_messages_api_have_its_shape(status: int, kind: str) -> None:
    engine = one(status, b'{"type":"error","error":{"type":"BadRequestError","message":"no"}}')
    got, _, answer = ask(engine, path="/v1/messages/count_tokens")
    assert got == status
    assert answer == {"type": "error", "error": {"type": kind, "message": "no"}}


@pytest.mark.parametrize("fault", [FAULT, LOADING, Failure.CONNECT, Failure.CLOSED, Failure.LOST])
def test_an_engine_that_fails_costs_a_second_try_and_is_asked_last(fault: Any) -> None:
    engines = _Engines(2)
    engines.says = lambda port: fault if port == 1 else OK
    assert [ask(engines)[0] for _ in range(12)] == [200] * 12
    assert engines.ports().count(1) <= 3
    assert engines.counts("pd_router_requests_total") == {"/tokenize,200": 12}
    assert sum(engines.counts("pd_router_retries_total").values()) == engines.ports().count(1)
    assert sum(engines.counts("pd_router_leg_failures_total").values()) == engines.ports().count(1)


def test_where_it_fails_says_nothing_of_other_endpoints() -> None:
    engines = _Engines(2)
    engines.says = lambda port: FAULT if port == 1 else OK
    for _ in range(12):
        ask(engines)
    engines.asked.clear()
    engines.says = lambda _port: OK
    for _ in range(4):
        ask(engines, path="/detokenize")
    assert engines.ports().count(1) == 2
    member = engines.fleet.member("e1")
    assert member is not None
    assert member.breaker.failures == 0


def test_one_that_recovers_is_asked_again() -> None:
    engines = _Engines(2)
    engines.says = lambda port: FAULT if port == 1 else OK
    for _ in range(8):
        ask(engines)
    engines.says = lambda _port: OK
    engines.time += 10.0
    engines.asked.clear()
    for _ in range(4):
        ask(engines)
    assert engines.ports().count(1) == 2


def test_where_all_fail_the_client_reads_so_and_engines_are_asked_twice_at_most() -> None:
    engines = _Engines(3)
    engines.says = lambda _port: FAULT
    assert ask(engines)[0] == 502
    assert len(set(engines.ports())) == len(engines.ports()) == 2
    assert engines.counts("pd_router_requests_total") == {"/tokenize,502": 1}


def test_the_only_engine_is_not_asked_twice_for_what_it_refuses() -> None:
    for fault in (FAULT, LOADING, (400, b"{}"), Failure.TIMEOUT, Failure.CONNECT):
        engines = _Engines()
        engines.says = lambda _port, fault=fault: fault  # type: ignore[misc]
        assert ask(engines)[0] >= 400
        assert len(engines.asked) == 1


@pytest.mark.parametrize("path", ["/tokenize", "/v1/models"])
def test_a_kept_connection_that_was_closed_as_the_request_came_is_no_failure(path: str) -> None:
    engines = _Engines()
    answers = itertools.cycle([OK, Failure.CLOSED])
    engines.says = lambda _port: next(answers)
    assert [ask(engines, path=path)[0] for _ in range(8)] == [200] * 8
    assert engines.anew == [False, *[False, True] * 7]


def test_retries_of_engines_that_answer_have_a_budget() -> None:
    engines = _Engines(2)
    engines.retries = RetryBudget(0.0)
    engines.says = lambda port: FAULT if port == 1 else OK
    assert [ask(engines)[0] for _ in range(8)].count(502) == 3


def test_requests_in_a_row_are_spread() -> None:
    engines = _Engines(2)
    for _ in range(20):
        ask(engines)
    assert engines.ports().count(1) == 10


def test_admission_holds_for_them() -> None:
    engines = _Engines(max_inflight=2, max_queue=3)
    clients = [_Client() for _ in range(8)]
    inside: list[float] = []

    def answer(_port: int) -> tuple[int, bytes]:
        inside.append(engines.counts("pd_router_inflight")[""])
        return OK

    engines.says = answer

    async def all_at_once() -> None:
        await asyncio.gather(*(send(engines, client) for client in clients))

    asyncio.run(all_at_once())
    assert sorted(client.answer[0] for client in clients) == [200] * 5 + [429] * 3
    assert engines.most <= 2
    assert max(inside) == 2
    assert engines.admission.inflight == 0
    assert engines.counts("pd_router_requests_total") == {"/tokenize,200": 5, "/tokenize,429": 3}
    assert engines.counts("pd_router_leg_inflight") == {}


def test_a_client_that_leaves_the_queue_costs_no_engine() -> None:
    engines = _Engines(max_inflight=1, max_queue=1)
    first, second = _Client(), _Client()

    async def leave() -> None:
        running = asyncio.create_task(send(engines, first))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(send(engines, second))
        await asyncio.sleep(0)
        second.gone = True
        assert second.on_gone is not None
        second.on_gone()
        await asyncio.gather(running, waiting)

    asyncio.run(leave())
    assert (first.answer[0], second.answer[0], len(engines.asked)) == (200, 0, 1)
    assert engines.counts("pd_router_requests_total") == {"/tokenize,200": 1, "/tokenize,499": 1}
