"""A prefill and a decode engine that answer from memory, so that the router in front of them is all that costs.

One process serves both roles, each on its own port. Nothing is parsed that need not be: a request is its headers, a
length and a few byte searches. Answers are built once; only the number of the turn is written into each handle, which
lets the prefill side count how many handles came back and how many came back twice.

It is separate from the fake engine of the component tests because that one checks everything and this one must cost
nothing: the load generator and this process share the core that the router under test does not have.

Besides the engine's endpoints each port answers ``GET /counters`` (JSON) and ``POST /setup`` (``{"gap_ms": 1.0}``: time
between two tokens, zero sends the whole answer in one write; sets the counters back to zero).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

import uvloop

MODEL: Final = "m"
BLOCK_TOKENS: Final = 32
TOKEN_TEXT: Final = " token"
_TURN: Final = "turn-000000000000"
_TURN_PREFIX: Final = b'"remote_request_id":"turn-'
_TURN_DIGITS: Final = len(_TURN) - len("turn-")
_BACKLOG: Final = 4096
_TURN_PATHS: Final = frozenset({b"/v1/chat/completions", b"/v1/completions"})


@dataclass(slots=True)
class Counters:
    """What happened since the last ``POST /setup``; turns, not requests for health or models."""

    prefills: int = 0
    attached: int = 0
    """Prefills that carried a decode engine's handle."""
    repeated: int = 0
    """Of those, the ones whose handle had been seen before: a handle is good for one send."""
    decodes: int = 0
    handed_over: int = 0
    """Decodes that carried the prefill engine's handle."""
    finished: int = 0
    """Decodes whose answer was written to its end."""
    renders: int = 0
    """Requests to turn a prompt into token ids, which some routing policies make before each turn."""
    unknown: int = 0
    """Posts to any other path; answered with 404."""


@dataclass(slots=True)
class Answers:
    """Ready-made bytes. ``last`` is split where the number of the turn goes."""

    prefill: bytes
    prefill_with_report: bytes
    stream_start: bytes
    first: bytes
    token: bytes
    last: tuple[bytes, bytes]
    usage: bytes
    end: bytes
    whole: tuple[bytes, bytes]
    models: bytes
    rendered: bytes
    ok: bytes
    not_found: bytes


@dataclass(slots=True)
class Engine:
    """State that both ports share."""

    answers: Answers
    tokens: int
    gap_s: float = 0.0
    turn: int = 0
    counters: Counters = field(default_factory=Counters)
    seen: set[bytes] = field(default_factory=set)


def build_answers(tokens: int, blocks: int, verified: bool) -> Answers:
    """All answers of both roles.

    Args:
        tokens: content chunks in one answer.
        blocks: KV blocks that a handle names.
        verified: add what the product's connector adds (proof and mode to the handle, a report to the prefill answer).
    """
    prompt_tokens = blocks * BLOCK_TOKENS
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": prompt_tokens + 1}
    to_decode = _handle(blocks, "prefill-000", do_remote_prefill=True)
    to_prefill = _handle(blocks, _TURN, do_remote_prefill=False)
    to_prefill["remote_blocks_expiry_time"] = 9_000_000.0
    with_report = dict(to_decode)
    if verified:
        fingerprints = bytes(i % 251 for i in range(8 * blocks))
        to_prefill["pd_mode"] = "Pinned"
        to_prefill["pd_proof"] = {
            "v": 1,
            "block_tokens": BLOCK_TOKENS,
            "key": base64.b64encode(bytes(range(16))).decode(),
            "fp": base64.b64encode(fingerprints).decode(),
        }
        with_report["pd_report"] = {
            "verdict": "proven",
            "reason": "",
            "proven_tokens": prompt_tokens,
            "local_tokens": 0,
            "pulled_tokens": prompt_tokens,
        }
    total = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens, "total_tokens": prompt_tokens + tokens}
    finish = _chunk({"content": ""}, "stop") | {"kv_transfer_params": to_prefill}
    return Answers(
        prefill=_json_answer(_completion("", usage, to_decode)),
        prefill_with_report=_json_answer(_completion("", usage, with_report)),
        stream_start=_head("text/event-stream; charset=utf-8", "transfer-encoding: chunked"),
        first=_event(_chunk({"role": "assistant", "content": ""}, None)),
        token=_event(_chunk({"content": TOKEN_TEXT}, None)),
        last=_split(_event(finish)),
        usage=_event(_chunk({}, None) | {"choices": [], "usage": total}),
        end=_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        whole=_split(_json_answer(_completion(TOKEN_TEXT * tokens, total, to_prefill))),
        models=_json_answer({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]}),
        rendered=_json_answer({"request_id": "chatcmpl-0", "token_ids": list(range(1000, 1000 + prompt_tokens))}),
        ok=_json_answer({}),
        not_found=_json_answer({"detail": "Not Found"}, "404 Not Found"),
    )


def _handle(blocks: int, request_id: str, *, do_remote_prefill: bool) -> dict[str, Any]:
    return {
        "do_remote_prefill": do_remote_prefill,
        "do_remote_decode": not do_remote_prefill,
        "remote_block_ids": [list(range(100, 100 + blocks))],
        "remote_engine_id": "prefill-engine" if do_remote_prefill else "decode-engine",
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 8,
        "remote_num_tokens": blocks * BLOCK_TOKENS,
    }


def _chunk(delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1764470000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}],
    }


def _completion(text: str, usage: dict[str, int], handle: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion",
        "created": 1764470000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
        "usage": usage,
        "kv_transfer_params": handle,
    }


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _head(content_type: str, framing: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n".encode()


def _json_answer(value: Any, status: str = "200 OK") -> bytes:
    body = _dump(value)
    return _head("application/json", f"content-length: {len(body)}", status) + body


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: Any) -> bytes:
    return _framed(b"data: %b\n\n" % _dump(value))


def _split(data: bytes) -> tuple[bytes, bytes]:
    before, found, after = data.partition(_TURN.encode())
    if not found:
        raise AssertionError("the handle has no place for the number of the turn")
    return before, after


class Connection(asyncio.Protocol):
    """One keep-alive connection from a router, on the port of one role."""

    def __init__(self, engine: Engine, role: str) -> None:
        self._engine = engine
        self._is_prefill = role == "prefill"
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's, so an isinstance check would fail.
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while True:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                break
            head = buffer[:end].lower()
            stop = end + 4 + _content_length(head)
            if len(buffer) < stop:
                break
            self._answer(head, buffer[end + 4 : stop])
            buffer = buffer[stop:]
        self._buffer = buffer

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"get":
            self._transport.write(self._state_answer(path))
        elif path in _TURN_PATHS:
            self._prefill(body) if self._is_prefill else self._decode(body)
        else:
            self._transport.write(self._other_answer(path, body))

    def _state_answer(self, path: bytes) -> bytes:
        answers = self._engine.answers
        if path == b"/counters":
            return _json_answer(asdict(self._engine.counters))
        return answers.models if path == b"/v1/models" else answers.ok

    def _other_answer(self, path: bytes, body: bytes) -> bytes:
        engine = self._engine
        if path == b"/setup":
            engine.gap_s = json.loads(body)["gap_ms"] / 1e3
            engine.counters = Counters()
            return engine.answers.ok
        if path.endswith(b"/render"):
            engine.counters.renders += 1
            return engine.answers.rendered
        engine.counters.unknown += 1
        return engine.answers.not_found

    def _prefill(self, body: bytes) -> None:
        engine = self._engine
        engine.counters.prefills += 1
        at = body.find(_TURN_PREFIX)
        if at < 0:
            self._transport.write(engine.answers.prefill)
            return
        at += len(_TURN_PREFIX)
        turn = body[at : at + _TURN_DIGITS]
        engine.counters.attached += 1
        engine.counters.repeated += turn in engine.seen
        engine.seen.add(turn)
        self._transport.write(engine.answers.prefill_with_report)

    def _decode(self, body: bytes) -> None:
        engine = self._engine
        answers = engine.answers
        engine.counters.decodes += 1
        engine.counters.handed_over += b'"prefill-000"' in body
        engine.turn += 1
        turn = b"turn-%012d" % engine.turn
        if b'"stream":true' not in body and b'"stream": true' not in body:
            self._transport.write(turn.join(answers.whole))
            engine.counters.finished += 1
            return
        last = turn.join(answers.last)
        if b'"include_usage":true' in body or b'"include_usage": true' in body:
            last += answers.usage
        last += answers.end
        if engine.gap_s > 0:
            self._transport.write(answers.stream_start + answers.first)
            self._timer = self._loop.call_later(engine.gap_s, self._next_token, engine.tokens, last)
        else:
            self._transport.write(answers.stream_start + answers.first + answers.token * engine.tokens + last)
            engine.counters.finished += 1

    def _next_token(self, left: int, last: bytes) -> None:
        engine = self._engine
        if left:
            self._transport.write(engine.answers.token)
            self._timer = self._loop.call_later(engine.gap_s, self._next_token, left - 1, last)
        else:
            self._transport.write(last)
            self._timer = None
            engine.counters.finished += 1


def _content_length(head: bytes) -> int:
    if b"transfer-encoding:" in head:
        raise ValueError("the canned engine reads bodies with a content-length only")
    at = head.find(b"content-length:")
    if at < 0:
        return 0
    return int(head[at + 15 :].split(b"\r\n", 1)[0])


async def _serve(arguments: argparse.Namespace) -> None:
    answers = build_answers(arguments.tokens, arguments.blocks, arguments.connector == "verified")
    engine = Engine(answers, arguments.tokens)
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(
            lambda role=role: Connection(engine, role),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=_BACKLOG,
        )
        for role, port in (("prefill", arguments.prefill_port), ("decode", arguments.decode_port))
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="a prefill and a decode engine that answer from memory")
    parser.add_argument("--prefill-port", type=int, required=True)
    parser.add_argument("--decode-port", type=int, required=True)
    parser.add_argument(
        "--connector", choices=("verified", "stock"), default="verified", help="whose handles to imitate"
    )
    parser.add_argument("--tokens", type=int, default=64, help="content chunks in one answer")
    parser.add_argument("--blocks", type=int, default=100, help="KV blocks that a handle names")
    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
