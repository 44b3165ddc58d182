"""CPU microseconds of the router's pure half per step of one streamed turn: `python tests/perf/router_core.py`.

The turn is the one of the router cost measurement: a 12.5 KB prompt with a conversation id, 64 tokens streamed one by
one, a handle of 100 blocks. Figures are CPU time of this process, best of several rounds, so that a busy machine
disturbs little.
"""

from __future__ import annotations

import json
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "router"), str(_ROOT / "connector")]

from pd_router.core.jsontext import RawJson  # noqa: E402
from pd_router.core.linking import Keyring, tenant_of  # noqa: E402
from pd_router.core.placement import Engine, Loads, choose_decode, choose_prefill  # noqa: E402
from pd_router.core.policy import decide, judge_handle  # noqa: E402
from pd_router.core.request import Api, prepare  # noqa: E402
from pd_router.core.sse import Ending, SseFilter  # noqa: E402
from pd_router.core.store import Entry  # noqa: E402
from pd_router.core.store_memory import MemoryStore  # noqa: E402

HANDLE: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [list(range(100, 200))],
    "remote_engine_id": "0b8f6a52-8b0e-4a63-b0a4-0f4a6f1e2c3d",
    "remote_request_id": "chatcmpl-0123456789abcdef",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 8,
    "remote_num_tokens": 3200,
    "remote_blocks_expiry_time": 123456.789,
    "pd_proof": {"v": 1, "block_tokens": 32, "key": "A" * 24, "fp": "A" * 1068},
}
BODY: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "max_tokens": 64,
    "conversation_id": "c17",
    "messages": [{"role": "user", "content": "word " * 2500}],
}
HEADERS = {"authorization": "Bearer sk-0123456789abcdef0123456789abcdef", "content-type": "application/json"}
ENGINES = tuple(Engine(f"d{n}", f"http://d{n}:8200", "decode", "g1", "1", ready=True) for n in range(4))
HOSTS = frozenset({"10.0.0.7"})


def stream_events(handle: dict[str, Any]) -> list[bytes]:
    """66 events as vLLM writes them, the handle on the one with the finish reason, then [DONE]."""

    def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        chunk = {"id": "chatcmpl-abc123", "object": "chat.completion.chunk", "created": 1764470000, "model": "m"}
        return b"data: " + json.dumps({**chunk, "choices": [choice], **more}, separators=(",", ":")).encode() + b"\n\n"

    tokens = [event({"content": f" token{n}"}) for n in range(64)]
    finish = event({"content": ""}, "stop", kv_transfer_params=handle)
    return [event({"role": "assistant", "content": ""}), *tokens, finish, b"data: [DONE]\n\n"]


def measure(step: Callable[[], Any], rounds: int = 9, number: int = 300) -> float:
    """CPU microseconds per call, best round."""
    return min(timeit.repeat(step, number=number, repeat=rounds, timer=time.process_time)) / number * 1e6


def main() -> None:
    """Print the table."""
    raw = json.dumps(BODY, separators=(",", ":")).encode()
    models = frozenset({"m"})
    prepared = prepare(Api.CHAT, raw, HEADERS, models)
    keyring = Keyring(b"0" * 32)
    tenant = tenant_of(HEADERS, "authorization", False) or ""
    events = stream_events(HANDLE)
    store = MemoryStore(1 << 28, 100_000, 450.0, 480.0)
    loads = Loads()
    read = SseFilter()
    for event in events:
        read.feed(event)
    reply = read.reply()
    handle = read.handle
    assert handle is not None

    def relay() -> SseFilter:
        stream = SseFilter()
        for event in events:
            stream.feed(event)
        stream.flush()
        return stream

    def relay_and_read() -> None:
        stream = relay()
        assert stream.ending() is Ending.CLEAN
        assert stream.reply() is not None

    def entry() -> Entry:
        return Entry.of(handle, holder="d1", incarnation="1", generation="g1", arrived=1.0, turn=1 << 40, inexact=None)

    def keep_and_take() -> None:
        keys = keyring.lookup_keys(tenant, prepared)
        store.begin(keys, 1.0)
        found = store.take(keys, 1.0)
        decide(prepared, found, now=1.0, engines=ENGINES, hosts=HOSTS, ttl=450.0, shared_ttl=3600.0, threshold=64)
        store.put(entry(), keyring.store_keys(tenant, prepared, reply), 1.0)

    def place() -> None:
        decode = choose_decode(ENGINES, loads, "d1", 4)
        prefill = choose_prefill(ENGINES, loads, "g1")
        assert decode.engine is not None
        assert prefill.engine is not None
        loads.open(decode.engine.key).close()
        loads.open(prefill.engine.key, 3000).close()

    steps: list[tuple[str, Callable[[], Any]]] = [
        ("prepare (12.5 KB chat, conversation id)", lambda: prepare(Api.CHAT, raw, HEADERS, models)),
        ("tenant_of", lambda: tenant_of(HEADERS, "authorization", False)),
        ("prefill_body (handle of 100 blocks)", lambda: prepared.prefill_body(RawJson(handle.raw))),
        ("decode_body (handle of 100 blocks)", lambda: prepared.decode_body(HANDLE)),
        ("SseFilter, 67 events fed one by one", relay),
        ("  the same, then ending and reply", relay_and_read),
        ("judge_handle (100 blocks)", lambda: judge_handle(handle, HOSTS)),
        ("keys, begin, take, decide, put", keep_and_take),
        ("choose_decode and choose_prefill, leases", place),
    ]
    total = 0.0
    for name, step in steps:
        spent = measure(step)
        if step is not relay:
            total += spent
        print(f"{spent:8.1f} us  {name}")
    print(f"{total:8.1f} us  whole turn")


if __name__ == "__main__":
    main()
