"""One request for tokens: from its bytes to the bytes of its answer, with the planned fault at the planned point.

The only module that knows aiohttp's response objects closely. Order of a request: judge it, read the plan, validate as
vLLM would, give it its KV, then write the answer and close the books exactly once.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from aiohttp import web

from pd_wire import names
from support.fake_engine import contract, other_wire, wire
from support.fake_engine.answers import kv_hash, make_answer
from support.fake_engine.apis import PATHS, as_chat, limit_of
from support.fake_engine.behaviour import Behaviour, Fault, Kind, Point
from support.fake_engine.connector import TOLD_CACHED, LoadFailed, Parked, Run
from support.fake_engine.engine import FakeEngine, Record
from support.fake_engine.recut import Recutter
from support.fake_engine.tokens import PromptError, completion_prompts


class Refused(Exception):
    """An answer other than tokens, decided before any byte was sent."""

    def __init__(
        self, status: int, message: str, *, body: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(message)
        self.status, self.body, self.headers = status, body, dict(headers or {})


class Cut(Exception):
    """The answer ends here, with whatever was already sent."""


class Exchange:
    """One request for tokens and its answer."""

    def __init__(self, engine: FakeEngine, request: web.Request) -> None:
        self.engine, self.request = engine, request
        self.connector = engine.rank_for(request.headers.get(names.RANK_HEADER))
        self.api = PATHS[request.path]
        # A message is made of a chat completion and has its id.
        kind = {"completions": "cmpl", "responses": "resp"}.get(self.api, "chatcmpl")
        self.public_id = f"{kind}{'_' if kind == 'resp' else '-'}{secrets.token_hex(8)}"
        self.asked: dict[str, Any] = {}
        self.runs: list[Run] = []
        self.behaviour = Behaviour()
        self.record: Record | None = None

    async def answer(self) -> web.StreamResponse:
        try:
            raw = await self.request.read()
            self.record = record = self._judge(raw)
            self.behaviour = self.engine.behaviour_for(record)
            self._fault_if(Point.BEFORE_ADMISSION)
            await self._admit(record)
            return await self._reply(record)
        except Refused as refusal:
            return self._error(refusal)
        except asyncio.CancelledError:
            self._close("aborted")
            raise
        except ConnectionError:
            # Nobody is there to read it any more; raising would only fill the server's log.
            self._close("aborted")
            return web.Response(status=499)
        finally:
            self._close("failed")

    # --- before the answer --------------------------------------------------------------------

    def _judge(self, raw: bytes) -> Record:
        headers = [(key, value) for key, value in self.request.headers.items()]
        record = Record(
            self.request.path, headers, raw, {}, target=self.request.raw_path, rank=self.connector.rank or 0
        )
        self.engine.requests.append(record)
        role, fabric, name = self.engine.config.connector.role, self.engine.fabric, self.engine.name
        try:
            record.body, doubled = contract.parse_body(raw)
        except ValueError as error:
            fabric.violate(name, f"a body that is no JSON object: {error}")
            record.fate = "failed"
            raise Refused(400, str(error)) from error
        for breach in contract.breaches(role, self.api, record.body, doubled):
            fabric.violate(name, breach)
        for breach in contract.params_breaches(role, record.params, fabric, name):
            fabric.violate(name, breach)
        return record

    async def _admit(self, record: Record) -> None:
        body = record.body
        prompts = self._prompts(body)
        salt = str(body.get("cache_salt") or "")
        params = record.params if isinstance(record.params, dict) else None
        for index, prompt in enumerate(prompts):
            internal = f"cmpl-{self.public_id[-16:]}-{index}-{secrets.token_hex(4)}"
            run = Run(internal, list(prompt), len(prompt), body["model"], salt, params if index == 0 else None)
            self.runs.append(run)
            record.request_id = self.runs[0].request_id
            try:
                await self.connector.admit(run)
            except Parked:
                await _for_ever()
            except LoadFailed as failure:
                if self.behaviour.load_failure == "recompute":
                    await self.connector.recompute(run)
                else:
                    await self._load_failed(record, failure)
        record.prompt_tokens = sum(run.prompt_length for run in self.runs)
        record.local_tokens = sum(run.local for run in self.runs)
        record.pulled_tokens = sum(run.pulled for run in self.runs)

    def _prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """Validate as vLLM does and tokenise."""
        # As in vLLM, no model means the one that is served.
        body.setdefault("model", self.engine.config.models[0])
        if body["model"] not in self.engine.config.models:
            raise Refused(404, f"The model `{body.get('model')}` does not exist.")
        if body.get("stream_options") and not body.get("stream"):
            raise Refused(400, "Stream options can only be defined when `stream=True`.")
        if (body.get("n") or 1) < 1 or body.get("n") == 0:
            raise Refused(400, "n must be at least 1")
        limit = limit_of(self.api, body)
        if body.get("previous_response_id") is not None and self.api == "responses":
            raise Refused(404, f"Response with id '{body['previous_response_id']}' not found.")
        if (body.get("min_tokens") or 0) > (limit if limit is not None else 1 << 30):
            raise Refused(400, "min_tokens must be less than or equal to max_tokens")
        try:
            self.asked = as_chat(self.api, body)
            template = self.engine.config.template
            prompts = completion_prompts(body) if self.api == "completions" else [template.render(self.asked)]
        except PromptError as error:
            raise Refused(400, str(error)) from error
        longest = max(map(len, prompts))
        if longest >= self.engine.config.max_model_len:
            raise Refused(400, f"This model's maximum context length is {self.engine.config.max_model_len} tokens.")
        forced = self.asked.get("tool_choice") not in (None, "none", "auto")
        if forced and self.engine.config.connector.role == "prefill":
            raise Refused(500, "Internal server error")
        return prompts

    async def _load_failed(self, record: Record, failure: LoadFailed) -> None:
        if self.behaviour.load_failure == "hang":
            await _for_ever()
        if self.behaviour.load_failure == "finish_error":
            for run in self.runs:
                self.connector.abort(run)
            self.behaviour = Behaviour(fault=Fault(Kind.FINISH_ERROR, Point.AFTER_HEADERS))
            return
        raise Refused(500, "Internal server error") from failure

    # --- the answer ---------------------------------------------------------------------------

    async def _reply(self, record: Record) -> web.StreamResponse:
        body, limit = record.body, limit_of(self.api, record.body)
        answers = tuple(
            make_answer(
                kv_hash(self.connector.contents(run), run.prompt_length), self.behaviour.style, self.asked, index, limit
            )
            for run in self.runs
            for index in range(body.get("n") or 1)
        )
        record.answer = answers[0].content
        cached = (record.local_tokens or 0) + (record.pulled_tokens or 0)
        told = record.params.get(TOLD_CACHED) if isinstance(record.params, dict) else None
        cached = told if isinstance(told, int) else cached
        prompt, details = record.prompt_tokens or 0, self.engine.config.details
        reply = wire.Reply(
            self.api, self.public_id, int(time.time()), body["model"], answers, prompt, cached, body, details
        )
        if self.behaviour.hold is not None:
            await self.behaviour.hold.wait()
        self._fault_if(Point.BEFORE_HEADERS)
        if self._is_fault(Kind.HANG, Point.BEFORE_HEADERS):
            await _for_ever()
        return await (self._stream(record, reply) if body.get("stream") else self._whole(record, reply))

    async def _whole(self, record: Record, reply: wire.Reply) -> web.StreamResponse:
        fault = self.behaviour.fault
        broken = fault is not None and fault.kind is Kind.FINISH_ERROR
        if fault is not None and fault.kind is Kind.ERROR_EVENT:
            raise Refused(500, "Internal server error")
        handle = None if broken else self._finish(reply)
        if self.api in ("responses", "messages"):
            body = other_wire.full_body(reply, handle, broken)
        else:
            body = wire.full_body(reply, handle, "error" if broken else None)
        data = json.dumps(body, ensure_ascii=False).encode()
        if fault is None or broken:
            whole = web.Response(body=data, content_type="application/json", headers=dict(self.behaviour.headers))
            if self.behaviour.gzip and "gzip" in self.request.headers.get("Accept-Encoding", ""):
                whole.enable_compression(web.ContentCoding.gzip)
            record.status = 200
            self._close("failed" if broken else "ended")
            return whole
        response = web.StreamResponse(headers={"Content-Type": "application/json", **self.behaviour.headers})
        response.content_length = len(data)
        await response.prepare(self.request)
        await response.write(data[: len(data) // 2])
        # Half of a body with a Content-Length cannot end in order.
        await self._break(Fault(Kind.CLOSE) if fault.kind is Kind.TRUNCATE else fault)
        return response

    async def _stream(self, record: Record, reply: wire.Reply) -> web.StreamResponse:
        behaviour = self.behaviour
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **behaviour.headers})
        if behaviour.gzip and "gzip" in self.request.headers.get("Accept-Encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        await response.prepare(self.request)
        record.status = 200
        writer = Recutter(response, behaviour)
        try:
            await self._events(reply, writer)
        except Cut:
            await writer.flush()
        else:
            await writer.flush()
            self._close("ended")
        return response

    async def _events(self, reply: wire.Reply, writer: Recutter) -> None:
        behaviour = self.behaviour
        handle = self._finish(reply) if behaviour.handle_on == "first" else None
        await self._fault_in_stream(Point.AFTER_HEADERS, reply, writer)
        seen: list[str] = []
        for number, event in enumerate(self._all_events(reply)):
            if behaviour.gate is not None and behaviour.gate.event == number:
                await writer.flush()
                await behaviour.gate.pass_through()
            if behaviour.event_delay and number:
                await asyncio.sleep(behaviour.event_delay)
            for point in _points(event.kind, seen):
                await self._fault_in_stream(point, reply, writer)
            if event.kind == "finish" and handle is None:
                handle = self._finish(reply)
            carries = event.data is not None and event.kind == behaviour.handle_on and event.kind not in seen
            holder = event.holder if event.holder is not None else event.data
            if carries and handle is not None and holder is not None:
                holder[names.KV_PARAMS] = handle
            data = wire.encode_event(event, behaviour)
            if self.engine.tap is not None:
                self.engine.tap(data)
            await writer.write(data)
            seen.append(event.kind)

    def _all_events(self, reply: wire.Reply) -> Iterator[wire.Event]:
        other = self.api in ("responses", "messages")
        return other_wire.stream_events(reply, self.behaviour) if other else wire.stream_events(reply, self.behaviour)

    def _finish(self, reply: wire.Reply) -> Any:
        """End every run in the engine; the handle of the first, as the plan wants it on the wire."""
        choices = max(1, len(reply.answers) // len(self.runs))
        handles = [self.connector.finish(run, reply.answers[i * choices].tokens) for i, run in enumerate(self.runs)]
        handle = handles[0]
        if handle is None or self.behaviour.handle_on == "none":
            return None
        if self.behaviour.edit_handle is None:
            return handle
        edited = self.behaviour.edit_handle(handle)
        if isinstance(edited, dict):
            self.engine.fabric.issue(self.runs[0].request_id, self.connector.engine_id, edited)
        return edited

    def _kv(self, run: Run) -> str:
        return kv_hash(self.connector.contents(run), run.prompt_length)

    # --- faults -------------------------------------------------------------------------------

    def _is_fault(self, kind: Kind, point: Point) -> bool:
        fault = self.behaviour.fault
        return fault is not None and fault.kind is kind and fault.at is point

    def _fault_if(self, point: Point) -> None:
        """Faults that need no open answer."""
        fault = self.behaviour.fault
        if fault is None or fault.at is not point:
            return
        if fault.kind is Kind.STATUS:
            raise Refused(fault.status, "planned", body=fault.body, headers=fault.headers)
        if fault.kind in (Kind.CLOSE, Kind.RESET):
            self._close("failed")
            self._drop(fault.kind)
            raise ConnectionResetError("planned")

    async def _fault_in_stream(self, point: Point, reply: wire.Reply, writer: Recutter) -> None:
        fault = self.behaviour.fault
        if fault is None or fault.at is not point:
            return
        if fault.kind is Kind.ERROR_EVENT:
            body = wire.error_body(500, "planned", self._leak())
            if self.api in ("responses", "messages"):
                await writer.write(wire.encode_event(other_wire.error_event(self.api, body), self.behaviour))
                raise Cut
            await writer.write(wire.encode_event(wire.Event("content", body), self.behaviour))
            await writer.write(wire.encode_event(wire.Event("done", None), self.behaviour))
            raise Cut
        if fault.kind is Kind.FINISH_ERROR:
            events = list(self._all_events(reply))
            event = next(event for event in events if event.kind == "finish")
            assert event.data is not None
            if self.api in ("responses", "messages"):
                other_wire.break_finish(event)
            else:
                event.data["choices"][0]["finish_reason"] = "error"
            await writer.write(wire.encode_event(event, self.behaviour))
            if events[-1].kind == "done":
                await writer.write(wire.encode_event(events[-1], self.behaviour))
            raise Cut
        await writer.flush()
        await self._break(fault)
        raise Cut

    async def _break(self, fault: Fault) -> None:
        if fault.kind is Kind.HANG:
            await _for_ever()
        if fault.kind in (Kind.CLOSE, Kind.RESET):
            # Let the bytes so far leave before the connection goes.
            await asyncio.sleep(0.01)
            self._close("failed")
            self._drop(fault.kind)

    def _drop(self, kind: Kind) -> None:
        transport = self.request.transport
        if transport is None:
            return
        if kind is Kind.CLOSE:
            transport.close()
            return
        sock = transport.get_extra_info("socket")
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()

    def _leak(self) -> Any:
        """A handle for an error body, when the plan wants a careless engine."""
        if not self.behaviour.errors_carry_params:
            return None
        return {
            "remote_engine_id": self.connector.engine_id,
            "remote_host": self.connector.host,
            "do_remote_decode": True,
        }

    def _error(self, refusal: Refused) -> web.Response:
        if self.record is not None:
            self.record.status = refusal.status
        body = refusal.body
        if body is None:
            body = json.dumps(wire.error_body(refusal.status, str(refusal), self._leak())).encode()
        return web.Response(status=refusal.status, body=body, headers=refusal.headers, content_type="application/json")

    def _close(self, fate: Any) -> None:
        """Close the books; only the first call counts."""
        if self.record is None or self.record.fate != "running":
            return
        self.record.fate = fate
        for run in self.runs:
            self.connector.abort(run)


def _points(kind: str, seen: list[str]) -> list[Point]:
    """The points that lie in front of the next event; ``seen`` are the kinds of those before it."""
    points = []
    if len(seen) == 1:
        points.append(Point.AFTER_FIRST_EVENT)
    if seen and seen[-1] == "content" and seen.count("content") == 1:
        points.append(Point.AFTER_FIRST_CONTENT)
    if kind == "finish":
        points.append(Point.BEFORE_FINISH)
    if kind == "done":
        points.append(Point.BEFORE_DONE)
    return points


async def _for_ever() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
