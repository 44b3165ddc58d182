"""CPU microseconds of a whole turn in the router without sockets: `python tests/perf/router_turn.py`.

The real `Router` with transports that only count: what is left is everything the router itself executes for one turn,
and nothing that the kernel or the event loop's C code does. Unlike the comparison with other routers it takes
seconds. The figure is the tenth percentile over single turns: those that nobody interrupted, so it repeats within a
few per cent on a busy machine, too. It is the tool for finding out where a turn's time goes (`--profile`) and what a
change gains (run it in two checkouts in turn). The turn is that of `router_core.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / "router"), str(_ROOT / "connector"), str(_ROOT / "tests")]

from pd_router.__main__ import parse_settings  # noqa: E402
from pd_router.shell.client import ClientConnection  # noqa: E402
from pd_router.shell.running import GC_THRESHOLD  # noqa: E402
from pd_router.shell.server import Router  # noqa: E402
from pd_router.shell.upstream import EngineConnection  # noqa: E402
from perf.router_core import BODY, HANDLE, stream_events  # noqa: E402

TURNS = 2000
PREFILL_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3200, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3168}},
    "kv_transfer_params": {**HANDLE, "do_remote_prefill": True, "do_remote_decode": False},
}
HEAD = b"HTTP/1.1 200 OK\r\ndate: x\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b\r\n\r\n"


class Wire:
    """A transport that hands what is written to `on_write` and is never full."""

    def __init__(self, on_write: Any) -> None:
        self._on_write = on_write

    def write(self, data: bytes) -> None:
        self._on_write(data)

    def writelines(self, parts: Any) -> None:
        self._on_write(b"".join(parts))

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    abort = close


class Bench:
    """One router, one connection of each kind, turns one after the other."""

    def __init__(self, burst: bool) -> None:
        flags = "--listen 127.0.0.1:0 --admin 127.0.0.1:0 --model m --anonymous reuse --allow-handle-host 10.0.0.7"
        engines = "--prefill http://127.0.0.1:1 --decode http://127.0.0.1:2"
        self.router = Router(parse_settings([*flags.split(), *engines.split()])[0])
        answer = json.dumps(PREFILL_ANSWER, separators=(",", ":")).encode()
        self._replies = {
            "http://127.0.0.1:1": [HEAD % (b"application/json", b"content-length: %d" % len(answer)) + answer],
            "http://127.0.0.1:2": self._decode_reads(burst),
        }
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        context = self.router.context
        for key in self._replies:
            member = context.member(key)
            context.fleet.set_ready(key, True)
            conn = EngineConnection(context.pool)
            conn.connection_made(Wire(lambda _data, c=conn, k=key: self._loop.call_soon(self._reply, c, k)))  # type: ignore[arg-type]
            context.pool._where[conn] = member.address
            conn.idle_since = self._loop.time() + 1e6
            context.pool._idle[member.address].append(conn)
        self.client = ClientConnection(self.router.state, time.monotonic)
        self.client.connection_made(Wire(self._to_client))  # type: ignore[arg-type]
        body = json.dumps(BODY, separators=(",", ":")).encode()
        lines = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request = f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body

    def _decode_reads(self, burst: bool) -> list[bytes]:
        head = HEAD % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")
        chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in stream_events(HANDLE)]
        if burst:
            return [head + b"".join(chunks) + b"0\r\n\r\n"]
        return [head + chunks[0], *chunks[1:-1], chunks[-1] + b"0\r\n\r\n"]

    def _reply(self, conn: EngineConnection, key: str, at: int = 0) -> None:
        """Deliver one read per turn of the loop, as a socket does."""
        reads = self._replies[key]
        if at + 1 < len(reads):
            self._loop.call_soon(self._reply, conn, key, at + 1)
        conn.data_received(reads[at])

    def _to_client(self, data: bytes) -> None:
        if data.endswith(b"0\r\n\r\n"):
            self._done.set()

    async def turns(self, count: int) -> None:
        for _ in range(count):
            self._done.clear()
            self.client.data_received(self._request)
            await self._done.wait()


async def measure(burst: bool, profile: bool, sort: str) -> None:
    bench = Bench(burst)
    await bench.turns(300)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    times: list[int] = []
    for _ in range(TURNS):
        started = time.thread_time_ns()
        await bench.turns(1)
        times.append(time.thread_time_ns() - started)
    times.sort()
    last = bench.router.context.decisions[-1]
    attached = last["attached"]
    if not attached:
        raise SystemExit(f"the turns carried no handle; the figures would mean nothing: {last}")
    low, middle = times[TURNS // 10] / 1e3, times[TURNS // 2] / 1e3
    print(f"{low:8.1f} us, median {middle:.1f}  {'burst' if burst else 'token by token'}")
    if profile:
        profiler = cProfile.Profile()
        profiler.enable()
        await bench.turns(2000)
        profiler.disable()
        pstats.Stats(profiler).sort_stats(sort).print_stats(70)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--sort", default="tottime", help="order of the profile, as pstats names it")
    arguments = parser.parse_args()
    for burst in (False, True):
        uvloop.run(measure(burst, arguments.profile, arguments.sort))


if __name__ == "__main__":
    main()
