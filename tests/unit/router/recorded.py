"""Streams as vLLM writes them, in two versions: with a handle, and as the client must see them.

Both are put together from the same text by hand, so that the expectation does not depend on the code under test.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

HANDLE: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[3, 1, 4], [1, 5]],
    "remote_engine_id": "engine-MARKER-7",
    "remote_request_id": "chatcmpl-r1",
    "remote_host": "10.1.2.3",
    "remote_port": 5600,
    "tp_size": 2,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": 1234567.875,
    "unknown": {"nested": [1, {"kv_transfer_params": "deep"}], "text": 'quote " brace } \\ 漢字 😀'},
    "pd_proof": {"v": 1, "block_tokens": 128, "key": "AAAAAAAAAAAAAAAAAAAAAA==", "fp": "AAAAAAAAAAA="},
}
HANDLE_TEXT = json.dumps(HANDLE, separators=(",", ":"), ensure_ascii=False)

HEAD = '"id":"chatcmpl-1","object":"chat.completion.chunk","created":1764470000,"model":"m"'
PIECES = (
    '"Hi"',
    '" 漢字"',
    '"😀👩‍👩‍👧"',
    r'"\ud83d\ude00\u00e9"',
    r'" say \"kv_transfer_params\":{\"a\":[1]} \\"',
    r'"\n\n data: {\"x\"}"',
    '"kv_transfer_params"',
)
"""JSON texts of tokens: plain, CJK, emoji with joiners, escaped surrogates, talk about the field, fake framing."""

PLACES = ("absent", "first", "finish", "usage", "extra", "null", "alone")
STYLES = ("last", "first", "middle", "spaced")


def chunk(delta: str, finish: str = "null", more: str = "") -> str:
    """One chunk's JSON, compact as pydantic writes it."""
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}'
    return f'{{{HEAD},"choices":[{choice}]{more}}}'


def with_member(payload: str, style: str, text: str = HANDLE_TEXT) -> tuple[str, str]:
    """`payload` with the handle as a member, and what must be left of it."""
    inner = payload[1:-1]
    member = f'"kv_transfer_params":{text}'
    if style == "last":
        return f"{{{inner},{member}}}", payload
    if style == "first":
        return f"{{{member},{inner}}}", payload
    if style == "middle":
        return f'{{{inner},{member},"end":1}}', f'{{{inner},"end":1}}'
    # The member goes with the comma before it; the spaces on either side are other bytes and stay.
    return f'{{ {inner} , "kv_transfer_params" : {text} , "end" : 1 }}', f'{{ {inner}  , "end" : 1 }}'


@dataclass(frozen=True)
class Recorded:
    """`raw` from the engine, `clean` for the client."""

    name: str
    raw: bytes
    clean: bytes
    has_handle: bool


def stream(place: str, style: str = "last", eol: str = "\n", space: str = " ", comments: bool = False) -> Recorded:
    """A whole stream: role, tokens, finish, usage, [DONE], with the handle at `place`."""
    usage = f'{{{HEAD},"choices":[],"usage":{{"prompt_tokens":9,"total_tokens":16,"completion_tokens":7}}}}'
    pairs = [(text, text) for text in (chunk('{"role":"assistant","content":""}'), *map(_token, PIECES))]
    finish = chunk('{"content":""}', '"stop"', ',"stop_reason":null')
    pairs += [(finish, finish), (usage, usage)]
    if place == "first":
        pairs[0] = with_member(pairs[0][0], style)
    elif place == "finish":
        pairs[-2] = with_member(finish, style)
    elif place == "usage":
        pairs[-1] = with_member(usage, style)
    elif place == "extra":
        pairs.append(with_member(f'{{{HEAD},"choices":[]}}', style))
    elif place == "null":
        pairs[-2] = with_member(finish, style, "null")
    elif place == "alone":
        pairs.append((f'{{"kv_transfer_params":{HANDLE_TEXT}}}', "{}"))
    pairs.append(("[DONE]", "[DONE]"))
    raw, clean = "", ""
    for number, (before, after) in enumerate(pairs):
        lead = f"event: message{eol}id: {number}{eol}" if comments and number % 3 == 2 else ""
        named = f": keep-alive kv_transfer_params{eol}" if comments and number % 3 == 1 else ""
        raw += f"{named}{lead}data:{space}{before}{eol}{eol}"
        clean += f"{lead}data:{space}{after}{eol}{eol}"
    return Recorded(f"{place}-{style}-{eol!r}-{space!r}", raw.encode(), clean.encode(), place not in ("absent", "null"))


def _token(text: str) -> str:
    return chunk(f'{{"content":{text}}}')


def big_stream(size: int = 300_000) -> Recorded:
    """A tool call whose arguments come in one event of `size` bytes, with the handle on that same event."""
    arguments = json.dumps(json.dumps({"text": '漢😀x\\"' * (size // 16)}, ensure_ascii=False), ensure_ascii=False)
    function = f'{{"name":"f","arguments":{arguments}}}'
    call = f'{{"tool_calls":[{{"index":0,"id":"c1","type":"function","function":{function}}}]}}'
    before, after = with_member(chunk(call), "middle")
    ends = [chunk('{"role":"assistant","content":""}'), None, chunk('{"content":""}', '"tool_calls"'), "[DONE]"]
    raw = "".join(f"data: {text or before}\n\n" for text in ends)
    clean = "".join(f"data: {text or after}\n\n" for text in ends)
    return Recorded("big", raw.encode(), clean.encode(), has_handle=True)
