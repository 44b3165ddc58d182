"""What handles cost: memory of 200,000 live conversations, and a million in a server that routers share.

`python tests/perf/handle_store.py [--memory N] [--shared N] [--tokens N] [--rounds N]`. Each part runs in a process of
its own, so that peaks do not mix. Ends with status 1 when the cap on bytes does not hold, a handle is lost below it, or
one is found twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT / folder) for folder in ("router", "connector", "tests")]

from pd_router.core.cutting import strip_json  # noqa: E402
from pd_router.core.linking import Keyring  # noqa: E402
from pd_router.core.store import ENTRY_OVERHEAD, Entry, Fate, Opened, PutResult, Ticket  # noqa: E402
from pd_router.core.store_memory import MemoryStore  # noqa: E402
from pd_router.core.store_value import key_name, write_entry  # noqa: E402
from support.redis_server import RedisServer  # noqa: E402
from support.valkey_bench import ValkeyBench  # noqa: E402

MIB = 1 << 20
TTL, ENGINE_TTL = 450.0, 480.0
SHARED_TTL = 3600.0
"""Long enough to write them all and to take some, however busy the machine is."""
TOKENS = 24_000
BLOCK = 16
FILL = 500
SERVER_BYTES = 8 << 30


def handle(tokens: int, number: int = 0) -> bytes:
    """An answer with D's handle for so many tokens, as our connector writes it: block ids and 8 bytes of proof each."""
    blocks = -(-tokens // BLOCK)
    first = (number * 7919) % 1_000_000
    value = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(first, first + blocks))],
        "remote_engine_id": "0b8f6a52-8b0e-4a63-b0a4-0f4a6f1e2c3d",
        "remote_request_id": f"chatcmpl-{number:016x}",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 8,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": 123456.789,
        "pd_proof": {"v": 1, "block_tokens": BLOCK, "key": "A" * 24, "fp": "A" * (blocks * 8 * 4 // 3)},
    }
    return json.dumps({"kv_transfer_params": value}, separators=(",", ":")).encode()


def entry(number: int, turn: int, now: float, tokens: int = TOKENS, ticket: Ticket | None = None) -> Entry:
    """What the router makes of it."""
    found = strip_json(handle(tokens, number))[1]
    assert found is not None
    return Entry.of(
        found,
        holder="d1",
        incarnation="1",
        generation="g1",
        arrived=now,
        turn=turn,
        inexact=None,
        sent=now,
        identity="uid/start",
        ticket=ticket,
    )


def keys_of(ring: Keyring, number: int, tenant: str = "t") -> tuple[bytes, bytes]:
    """The two keys of a conversation: its history, and its id."""
    return ring.key(tenant, b"scope", "history", b"%d" % number), ring.key(
        tenant, b"scope", "conversation_id", b"%d" % number
    )


def peak_rss() -> int:
    """Bytes, of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def microseconds(times: Sequence[float]) -> str:
    """p50 and p99."""
    cuts = statistics.quantiles(times, n=100)
    return f"p50 {cuts[49] * 1e6:8.1f} us   p99 {cuts[98] * 1e6:8.1f} us"


# -- in memory ---------------------------------------------------------------------------------------
def in_memory(count: int) -> None:
    """All of them live at once: with a cap that has room for all, and with the default one."""
    one = entry(0, 1, 0.0)
    print(f"handle of {TOKENS} tokens: {len(one.raw)} bytes")
    ring = Keyring(b"0" * 32)
    base = peak_rss()
    for cap in (256 * MIB, count * (len(one.raw) + ENTRY_OVERHEAD) * 5 // 4):
        store = MemoryStore(cap, count, TTL, ENGINE_TTL)
        now = 0.0
        for number in range(count):
            now += 300.0 / count
            keys = keys_of(ring, number)
            kept = entry(number, store.open(keys, now).turn, now)
            assert store.put(kept, keys, now) is PutResult.STORED
            if (store.stats(now).bytes or 0) > cap if number % 1000 == 0 else False:
                raise SystemExit(f"the cap of {cap} bytes does not hold")
        stats, rss = store.stats(now), peak_rss()
        times = _take_times(store, ring, range(count - 1, max(0, count - 2000), -1), now)
        evicted = stats.fates.get(Fate.EVICTED, 0)
        print(
            f"cap {cap / MIB:6.0f} MiB: {stats.entries} live, {evicted} evicted, {(stats.bytes or 0) / MIB:.0f} MiB "
            f"counted, peak RSS {rss / MIB:.0f} MiB ({(rss - base) / MIB:.0f} above the start), "
            f"take {microseconds(times)}"
        )
        if (stats.bytes or 0) > cap or (evicted and cap > 256 * MIB):
            raise SystemExit("the books do not balance")
        del store


def _take_times(store: MemoryStore, ring: Keyring, numbers: Sequence[int], now: float) -> list[float]:
    times = []
    for number in numbers:
        keys = keys_of(ring, number)
        began = time.perf_counter()
        found = store.open(keys, now).found
        times.append(time.perf_counter() - began)
        if found is None:
            raise SystemExit(f"the handle of conversation {number} is lost")
    return times


# -- shared ------------------------------------------------------------------------------------------
async def shared(count: int, rounds: int, tokens: int) -> None:
    """As many as fit 8 GiB; then takes, alone and 16 at a time, of what is there and of what is another tenant's."""
    server = RedisServer("--maxmemory", str(SERVER_BYTES), "--maxmemory-policy", "noeviction")
    await server.start()
    bench = ValkeyBench(server, "perf", ttl=SHARED_TTL, engine_ttl=SHARED_TTL + 30, connections=32)
    ring = Keyring(b"0" * 32)
    try:
        await bench.start()
        began = time.monotonic()
        stored = await _fill(bench, ring, count, tokens)
        with server.client() as client:
            used = int(client.info("memory")["used_memory"])
        print(
            f"{stored} handles of {tokens} tokens (written in {time.monotonic() - began:.0f} s), "
            f"the server has {used / MIB:.0f} MiB, {used / max(stored, 1) / 1024:.1f} KiB each"
        )
        numbers = random.Random(3).sample(range(1, stored + 1), min(stored, 4 * rounds))
        mine, foreign = numbers[:rounds], numbers[rounds : 2 * rounds]
        cpu = time.process_time()
        hits = [await _open(bench, ring, number) for number in mine]
        print(f"CPU of the router per opening: {(time.process_time() - cpu) / len(mine) * 1e6:.0f} us")
        others, absent = await _paired(bench, ring, foreign, range(count + 2, count + 2 + rounds))
        print(f"open, handle found:              {microseconds(hits)}")
        print(f"open, another tenant's handle:   {microseconds(others)}")
        print(f"open, no such conversation:      {microseconds(absent)}")
        at_once = await _at_once(bench, ring, numbers[2 * rounds :], 16)
        print(f"open, handle found, 16 at once:  {microseconds(at_once)}")
        for number in mine[:100]:
            if (await _opened(bench, ring, number, "t")).found is not None:
                raise SystemExit(f"the handle of conversation {number} was taken twice")
    finally:
        await bench.store.stop()
        server.close()


async def _fill(bench: ValkeyBench, ring: Keyring, count: int, tokens: int) -> int:
    """Write what the scripts would write, many at a time, until the server is full; how many there are."""
    opened = await _opened(bench, ring, -1, "t")
    ticket = opened.ticket
    assert ticket is not None
    kept = entry(0, 1, bench.now, tokens, ticket)
    start, life, stored = bench.prefix, round(SHARED_TTL * 1000), 0
    with bench.server.client() as client, client.pipeline(transaction=False) as pipe:
        for first in range(1, count + 1, FILL):
            numbers = range(first, min(first + FILL, count + 1))
            server_ms = _server_ms(client)
            for number in numbers:
                names = [key_name(key) for key in keys_of(ring, number)]
                value = write_entry(kept, names, ticket.era, server_ms, server_ms, "perf", bench.seal)
                pipe.set(start + b"e%d" % number, value, px=life)
                for name in names:
                    pipe.set(start + b"k" + name, b"%d" % number, px=life)
            answers = pipe.execute(raise_on_error=False)
            stored = first - 1 + len(numbers)
            if any(isinstance(answer, Exception) for answer in answers):
                # The last lot is cut off somewhere: what is measured lies before it.
                return first - 1
        client.hset(start + b"s", "turn", count + 1)
    return stored


def _server_ms(client: Any) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


async def _opened(bench: ValkeyBench, ring: Keyring, number: int, tenant: str) -> Opened:
    opened = bench.store.open(keys_of(ring, number, tenant), bench.now)
    return opened if isinstance(opened, Opened) else await opened


async def _open(bench: ValkeyBench, ring: Keyring, number: int, tenant: str = "t", *, there: bool = True) -> float:
    keys = keys_of(ring, number, tenant)
    began = time.perf_counter()
    opened = bench.store.open(keys, bench.now)
    found = opened if isinstance(opened, Opened) else await opened
    spent = time.perf_counter() - began
    if found.ticket is None:
        raise SystemExit("the server did not answer in time")
    if (found.found is not None) is not there:
        raise SystemExit(f"conversation {number} of {tenant}: found what is not there, or not what is")
    return spent


async def _paired(
    bench: ValkeyBench, ring: Keyring, foreign: Sequence[int], absent: Sequence[int]
) -> tuple[list[float], list[float]]:
    """What another tenant has, and what nobody has, in an order by chance: can one be told from the other?"""
    chance = random.Random(5)
    times: tuple[list[float], list[float]] = [], []
    for other, nobody in zip(foreign, absent, strict=True):
        asked = [(0, other, "somebody else"), (1, nobody, "t")]
        chance.shuffle(asked)
        for place, number, tenant in asked:
            times[place].append(await _open(bench, ring, number, tenant, there=False))
    return times


async def _at_once(bench: ValkeyBench, ring: Keyring, numbers: Sequence[int], width: int) -> list[float]:
    left = iter(numbers)

    async def some() -> list[float]:
        return [await _open(bench, ring, number) for number in left]

    return [one for times in await asyncio.gather(*(some() for _ in range(width))) for one in times]


def main() -> None:
    """Run both parts, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--memory", type=int, default=200_000, metavar="N", help="conversations in memory; 0: leave out"
    )
    parser.add_argument("--shared", type=int, default=1_000_000, metavar="N", help="handles in a server; 0: leave out")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="of each of them")
    parser.add_argument("--rounds", type=int, default=2000, metavar="N", help="takes that are timed")
    parser.add_argument("--part", choices=("memory", "shared"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "memory":
        in_memory(args.memory)
    elif args.part == "shared":
        asyncio.run(shared(args.shared, args.rounds, args.tokens))
    else:
        for part in ("memory", "shared"):
            if getattr(args, part):
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part], check=False)
                if done.returncode:
                    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
