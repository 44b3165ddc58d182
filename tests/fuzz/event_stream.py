"""Target: an engine's event stream on its way to a client.

What must hold for any bytes: nothing is raised but `EventTooLarge`; how the bytes were cut changes nothing; reads that
take the short way come out as those that don't; and what a client makes of the result, by the rules of event streams
and with another JSON parser, has no handle anywhere.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from fuzz.mutate import TOKENS, mutate, pieces
from pd_router.core.dialect import DIALECTS
from pd_router.core.sse import EventTooLarge, SseFilter
from pd_wire.names import KV_PARAMS

MARK = "LEAKEDHANDLE"
"""Stands in handles and nowhere else."""
STREAM_TOKENS = (
    *TOKENS,
    *(b"data: ", b"data:", b"event: error\n", b": comment\n", b"id: 1\n", b"[DONE]", b"data: [DONE]\n\n", b'"error"'),
    *(KV_PARAMS.encode(), b'"kv_transfer_params":', b'\\"kv_transfer_params\\":', b'"kv_transfer_params":null,'),
    *(b'"finish_reason":"stop"', b'"choices":[]', b'"usage":{}', b"\\u005f"),
)
_KEY = re.compile(rb'(?<!\\)"(?:k|\\u006[Bb])(?:v|\\u0076)(?:_|\\u005[Ff])transfer_params"\s*:')
TALK = (
    "Hello", "", "世界 🙂",
    'say "kv_transfer_params": now', '{"kv_transfer_params": {"remote_host": 1}}', "\\", "\u2028",
    "data: [DONE]\n\n", "\r\n", '"error"', "a\\u006bb", "x" * 300,
)  # fmt: skip


def handle(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {
        "do_remote_prefill": True,
        "remote_engine_id": f"{MARK}-{rng.randrange(9)}",
        "remote_block_ids": [[1, 2, 3]],
        "remote_host": MARK,
        "remote_port": 5600,
    }
    if rng.random() < 0.3:
        made["x"] = {rng.choice(("a", KV_PARAMS, "error")): rng.choice(([MARK], '"}', "\\", {"b": MARK}))}
    return made


def chunk(rng: random.Random) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "delta": {"content": rng.choice(TALK)}, "finish_reason": None}
    made: dict[str, Any] = {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}
    match rng.randrange(9):
        case 0:
            choice["finish_reason"] = rng.choice(("stop", "length", "error", "abort"))
        case 1:
            made = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
        case 2:
            made = {"error": {"message": rng.choice(("bad", f"remote_host {MARK}")), "code": rng.choice((400, 500))}}
        case 3:
            made = {"type": rng.choice(("response.completed", "message_stop", "response.failed")), "response": made}
        case 4:
            choice["delta"] = {"tool_calls": [{"index": 0, "function": {"arguments": rng.choice(TALK)}}]}
    if rng.random() < 0.3:
        where = rng.choice((made, choice, made.get("response", made)))
        where[KV_PARAMS] = rng.choice((handle(rng), handle(rng), handle(rng), None, [handle(rng)], MARK))
        if rng.random() < 0.4:
            where["after"] = 1
    return made


TYPES = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
    *("message_stop", "ping", "error", "response.created", "response.output_text.delta", "response.completed"),
    *("response.incomplete", "response.failed", "response.output_item.done"),
)
FIELDS = (
    *("type", "message", "content_block", "delta", "usage", "index", "content", "text", "partial_json", "stop_reason"),
    *("response", "output", "item", "status", "id", "role", "name", "arguments", "call_id", "error", "choices"),
)
PARTS = {"message_start": "message", "content_block_start": "content_block"}
"""Where an event of this type has what it says; else in `delta` or `response`."""


def typed(rng: random.Random) -> dict[str, Any]:
    """An event of the other two APIs, true in its type and in little else."""
    kind = rng.choice(TYPES)
    made = {"type": kind, **{rng.choice(FIELDS): junk(rng, 3) for _ in range(rng.randrange(5))}}
    if rng.random() < 0.7:
        part = PARTS.get(kind, "response" if kind.startswith("response") else "delta")
        made[part] = {rng.choice(FIELDS): junk(rng, 2) for _ in range(rng.randrange(4))}
    if rng.random() < 0.3:
        made[rng.choice((KV_PARAMS, KV_PARAMS, "response"))] = {KV_PARAMS: handle(rng)}
    return made


def junk(rng: random.Random, depth: int) -> Any:
    """A value of any type, with fields that the APIs have."""
    kinds = 9 if depth else 6
    match rng.randrange(kinds):
        case 0:
            return None
        case 1:
            return rng.choice((0, -1, 1.5, True, 2**70))
        case 2 | 3:
            return rng.choice((*TALK, *TYPES, "text", "tool_use", "thinking", "text_delta", "input_json_delta"))
        case 4:
            return []
        case 5:
            return {}
        case 6:
            return [junk(rng, depth - 1) for _ in range(rng.randrange(3))]
        case _:
            return {rng.choice(FIELDS): junk(rng, depth - 1) for _ in range(rng.randrange(4))}


def event(rng: random.Random) -> bytes:
    separators = rng.choice(((",", ":"), (", ", ": "), (" , ", " :\t")))
    said = chunk(rng) if rng.random() < 0.6 else typed(rng)
    text = json.dumps(said, ensure_ascii=rng.random() < 0.5, separators=separators)
    if rng.random() < 0.05:
        text = text.replace('"kv_transfer', rng.choice(('"\\u006bv_transfer', '"kv\\u005Ftransfer')))
    end = rng.choice(("\n", "\n", "\n", "\r\n", "\r"))
    lines = [f"data:{rng.choice((' ', ''))}{text}"]
    if rng.random() < 0.1:
        cut = text.find(",") + 1
        lines = [f"data: {text[:cut]}", f"data: {text[cut:]}"]
    if rng.random() < 0.1:
        lines.insert(
            rng.randrange(2), rng.choice((": ping", "event: x", "id: 7", "retry: 5", "data", f": {KV_PARAMS}"))
        )
    return (end.join(lines) + end + end).encode("utf-8", "surrogatepass")


def one(rng: random.Random) -> None:
    """Make one input and judge it. Raises AssertionError, or whatever the router raises."""
    events = [event(rng) for _ in range(rng.randrange(1, 8))]
    if rng.random() < 0.7:
        events.append(b"data: [DONE]\n\n")
    data = b"".join(events)
    intact = rng.random() < 0.4
    if not intact:
        data = mutate(rng, data, STREAM_TOKENS)
    name = rng.choice(list(DIALECTS))
    whole = relay(name, [data])
    cut = relay(name, pieces(rng, data))
    judge_client(whole[0])
    judge_client(cut[0])
    if intact:
        assert MARK.encode() not in whole[0], "a handle came through"
        assert MARK.encode() not in cut[0], "a handle came through"
        assert whole == cut, "cutting the bytes made another stream of them"
        assert framed(name, events) == whole, "the short way is another way"


def relay(name: Any, parts: list[bytes]) -> tuple[bytes, Any]:
    stream = SseFilter(dialect=DIALECTS[name])
    try:
        out = b"".join([stream.feed(part) for part in parts]) + stream.flush()
    except EventTooLarge:
        return b"", None
    stream.ending()
    stream.reply()
    return out, stream.handle


def framed(name: Any, events: list[bytes]) -> tuple[bytes, Any]:
    """The same events as HTTP chunks, by the short way where it takes them."""
    stream = SseFilter(dialect=DIALECTS[name])
    out: list[bytes] = []
    passed = stream.passer(lambda read: out.append(unchunked(read)))
    for data in events:
        read = b"%x\r\n%b\r\n" % (len(data), data)
        if not (stream.started and passed(read)):
            out.append(stream.feed(data))
    out.append(stream.flush())
    return b"".join(out), stream.handle


def unchunked(read: bytes) -> bytes:
    body = b""
    while read:
        size, _, read = read.partition(b"\r\n")
        body, read = body + read[: int(size, 16)], read[int(size, 16) + 2 :]
    return body


def judge_client(out: bytes) -> None:
    """A client finds no handle: not as a member of an event, and not as text of one that is no JSON."""
    for payload in payloads(out):
        if KV_PARAMS.encode() not in payload and b"\\u" not in payload:
            continue
        try:
            parsed = json.loads(payload)
        except (ValueError, RecursionError):
            assert not (_KEY.search(payload) and MARK.encode() in payload), payload
            continue
        assert not has_handle(parsed), payload


def payloads(out: bytes) -> list[bytes]:
    """The data of each event, as the specification of event streams has it."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in re.split(rb"\r\n|\n|\r", out.removeprefix(b"\xef\xbb\xbf")):
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                lines.append(value.removeprefix(b" "))
        elif lines:
            found.append(b"\n".join(lines))
            lines = []
    return [*found, b"\n".join(lines)] if lines else found


def has_handle(value: Any) -> bool:
    if isinstance(value, dict):
        return any((name == KV_PARAMS and inner is not None) or has_handle(inner) for name, inner in value.items())
    return isinstance(value, list) and any(map(has_handle, value))
