"""The shared store over a real server: the port's behaviour, what happens when the server fails, what is believed."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme

from pd_router.core.store import Fate, Opened, PutResult
from pd_router.shell.valkey_client import Link
from support.redis_server import RedisServer
from support.valkey_bench import ValkeyBench, written
from support.waiting import until
from unit.router.store_behaviour import HISTORY_1, ID_A, ID_B, PROCESS, Benched, StoreBehaviour, entry

Make = Callable[..., Awaitable[Benched]]
_realms = (f"prod/qwen-{number}" for number in itertools.count())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    try:
        await server.start()
        yield server
    finally:
        server.close()


@pytest_asyncio.fixture(loop_scope="session")
async def start_server() -> AsyncIterator[Callable[..., Awaitable[RedisServer]]]:
    """Servers of a test's own."""
    servers: list[RedisServer] = []

    async def start(*options: str, **how: Any) -> RedisServer:
        server = RedisServer(*options, **how)
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        server.close()


@pytest_asyncio.fixture(loop_scope="session")
async def make(shared_server: RedisServer) -> AsyncIterator[Make]:
    """A router's store: ``await make()``, with ``realm`` one that shares, with ``server`` another server."""
    benches: list[ValkeyBench] = []

    async def build(server: RedisServer | None = None, realm: str = "", *, up: bool = True, **how: Any) -> Benched:
        bench = ValkeyBench(server or shared_server, realm or next(_realms), **how)
        benches.append(bench)
        await bench.start(up=up)
        return Benched(bench)

    yield build
    for bench in benches:
        await bench.store.stop()


class TestValkeyStore(StoreBehaviour):
    precision = 1.0

    @pytest.fixture(autouse=True)
    def _given(self, make: Make) -> None:
        self._make = make

    async def make(self) -> ValkeyBench:
        return bench_of(await self._make())


def bench_of(store: Benched) -> ValkeyBench:
    assert isinstance(store.bench, ValkeyBench)
    return store.bench


# -- several routers ---------------------------------------------------------------------------------
async def test_what_one_router_leaves_another_finds(make: Make) -> None:
    one = await make()
    other = await make(realm=bench_of(one).realm, incarnation="7")
    left = await one.open(ID_A)
    sent = one.bench.now
    await one.put(left, [HISTORY_1, ID_A], arrived=sent)
    found = (await other.open(HISTORY_1)).found
    assert found is not None
    assert found.entry.incarnation == "7"
    [(holder, identity, told)] = bench_of(other).asked
    assert (holder, identity) == ("d1", PROCESS)
    assert sent - 0.5 < told <= sent
    assert await one.found(ID_A) is None
    # What is pinned is told by the router that left it, since only there it is known.
    other.bench.store.spent(found.entry)
    assert one.stats.pinned_tokens == {"d1": 1000}
    assert other.stats.pinned_tokens == {}


async def test_a_reader_keeps_to_its_own_limits(make: Make) -> None:
    one = await make()
    other = await make(realm=bench_of(one).realm, ttl=100.0, max_entry_bytes=10_000)
    await one.leave(ID_A)
    await one.leave(ID_B, blob="x" * 20_000)
    await one.bench.wait(150.0)
    assert await other.found(ID_A) is None
    assert other.stats.fates[Fate.EXPIRED] == 1
    assert await other.found(ID_B) is None
    assert bench_of(other).count("failures_total", operation="open", kind="damaged") == 1
    assert await one.found(ID_A, ID_B) is None


async def test_deployments_do_not_meet(make: Make) -> None:
    one, other = await make(), await make()
    await one.leave(ID_A)
    assert await other.found(ID_A) is None
    assert await one.found(ID_A) is not None


async def test_turns_of_all_routers_are_in_one_order(make: Make) -> None:
    one = await make()
    other = await make(realm=bench_of(one).realm)
    old, new = await one.open(ID_A), await other.open(ID_A)
    assert await one.put(old, [ID_A], host="old") is PutResult.LATE
    assert await other.put(new, [ID_A], host="new") is PutResult.STORED
    assert await one.found(ID_A) == "new"


async def test_one_of_two_routers_that_take_at_the_same_moment_wins(make: Make) -> None:
    one = await make()
    other = await make(realm=bench_of(one).realm)
    wins = {"one": 0, "other": 0}
    for _ in range(1000):
        await one.leave(HISTORY_1, ID_A)
        hosts = await asyncio.gather(one.found(ID_A), other.found(HISTORY_1))
        assert [host is None for host in hosts].count(False) == 1
        wins["one" if hosts[0] else "other"] += 1
    assert sum(wins.values()) == 1000
    assert await one.found(HISTORY_1, ID_A) is None


# -- the server fails --------------------------------------------------------------------------------
async def test_a_server_that_was_killed_gives_nothing_back(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server)
    await store.leave(ID_A)
    await store.leave(ID_B)
    with server.client() as client:
        client.save()
    assert await store.found(ID_A) is not None
    late = await store.open(HISTORY_1)
    server.kill()
    assert await store.found(ID_B) is None
    await server.start()
    with server.client() as client:
        handles = client.keys("pd:*:e*")
        assert len(handles) == 2, "the file brings both back, and one of them is spent"
    await bench_of(store).wait_up()
    assert await store.found(ID_A) is None
    assert await store.found(ID_B) is None
    assert await store.put(late, [HISTORY_1]) is PutResult.LATE
    await store.leave(ID_A, host="after")
    assert await store.found(ID_A) == "after"


async def test_a_dead_server_costs_a_turn_nothing(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server)
    opened = await store.open(ID_A)
    server.kill()
    await bench_of(store).wait_up(False)
    # Not even a place in the loop: the answer is there at once, and is no awaitable.
    assert store.bench.store.open([ID_A], store.bench.now) == Opened(0, None)
    assert store.bench.store.put(entry(1, ticket=opened.ticket), [ID_A], store.bench.now) is PutResult.UNAVAILABLE
    assert store.bench.store.forget([ID_A]) is None
    assert bench_of(store).count("up") == 0
    assert bench_of(store).count("skipped_total", operation="open") == 1
    assert bench_of(store).count("skipped_total", operation="put") == 1


async def test_a_router_starts_without_a_server_and_finds_it_later(make: Make, start_server: Any) -> None:
    server = await start_server()
    server.kill()
    store = await make(server, up=False)
    unopened = await store.open(ID_A)
    assert unopened == Opened(0, None)
    await server.start()
    await bench_of(store).wait_up()
    # Without a number nobody knows whether it is the newest turn.
    assert await store.put(unopened, [ID_A]) is PutResult.UNAVAILABLE
    assert await store.leave(ID_A) is PutResult.STORED


async def test_a_server_that_hangs_costs_one_timeout(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server, timeout=0.2)
    bench = bench_of(store)
    await store.leave(ID_A)
    opened = await store.open(ID_B)
    arrived = bench.now
    server.freeze()
    began = time.monotonic()
    results = await asyncio.gather(store.put(opened, [ID_B]), *(store.found(HISTORY_1) for _ in range(20)))
    assert time.monotonic() - began < 5.0
    assert results == [PutResult.UNAVAILABLE, *[None] * 20]
    assert bench.store.open([HISTORY_1], bench.now) == Opened(0, None)
    server.thaw()
    await bench.wait_up()
    assert await store.found(ID_A) is not None
    # The server has carried the put out when nobody waited for it any more. Its age is that of the handle all the same.
    found = (await store.open(ID_B)).found
    assert found is not None
    assert found.entry.arrived <= arrived + 0.01
    assert bench.count("failures_total", operation="put", kind="timeout") == 1


async def test_a_server_that_answers_probes_and_nothing_else_costs_ever_less(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server, timeout=0.05)
    bench = bench_of(store)
    await store.leave(ID_A)
    with server.client() as client:
        client.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
        for _ in range(80):
            assert await store.found(ID_A) is None
            await asyncio.sleep(0.01)
        tried = bench.count("failures_total", operation="open", kind="timeout")
        assert 2 <= tried <= 12
        assert bench.count("skipped_total", operation="open") == 80 - tried
        client.execute_command("CLIENT", "UNPAUSE")
    await bench.wait_up()
    await store.leave(ID_B)
    assert await store.found(ID_B) is not None
    assert bench.store._client._strikes == 0, "the next trouble is a first one"


async def test_an_answer_that_is_none_is_a_miss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that speaks the protocol and is no server of handles."""
    store = await make()
    opened = await store.open(ID_A)
    for answer in ([], [1, 2], b"OK", None, [1, b"x", b"y", 0, 0, 0, None, 0, 0], [1, b"1", b"1", 1, 0, 0, None, 0, 0]):

        async def call(*_: Any, answer: Any = answer) -> Any:
            return answer

        monkeypatch.setattr(Link, "call", call)
        assert await store.open(ID_A) == Opened(0, None)
        assert await store.put(opened, [ID_A]) is PutResult.UNAVAILABLE
        await store.forget(ID_A)
        await bench_of(store).wait_up()
    monkeypatch.undo()
    assert await store.leave(ID_A) is PutResult.STORED


async def test_a_router_can_stop_at_any_moment(shared_server: RedisServer) -> None:
    """While it connects, probes or waits. A cancellation that gets lost would hold the router for ever."""
    for number in range(600):
        bench = ValkeyBench(shared_server, next(_realms))
        bench.store.start()
        for _ in range(number % 60):
            await asyncio.sleep(0)
        async with asyncio.timeout(30.0):
            await bench.store.stop()


async def test_a_put_that_is_carried_out_after_its_time_keeps_nothing(make: Make) -> None:
    store = await make(ttl=3.0)
    opened = await store.open(ID_A)
    arrived = store.bench.now
    await store.bench.wait(3.0)
    assert await store.put(opened, [ID_A], arrived=arrived) is PutResult.EXPIRED
    assert await store.found(ID_A) is None


async def test_a_take_whose_answer_is_lost_has_happened(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server, timeout=0.2)
    await store.leave(ID_A)
    server.freeze()
    assert await store.found(ID_A) is None
    server.thaw()
    await bench_of(store).wait_up()

    async def carried_out() -> bool:
        return not any(key.startswith(bench_of(store).prefix + b"e") for key in bench_of(store).names())

    await until(carried_out)
    assert await store.found(ID_A) is None


async def test_a_server_that_becomes_a_replica_is_left_until_it_is_none(make: Make, start_server: Any) -> None:
    server, other = await start_server(), await start_server()
    store = await make(server)
    await store.leave(ID_A)
    with server.client() as client:
        client.replicaof("127.0.0.1", other.port)
        assert await store.found(ID_B) is None
        assert bench_of(store).count("failures_total", operation="open", kind="read_only") == 1
        await bench_of(store).wait_up(False)
        client.replicaof("NO", "ONE")
    await bench_of(store).wait_up()
    await store.leave(ID_A)
    assert await store.found(ID_A) is not None


async def test_a_replica_is_never_used(make: Make, start_server: Any) -> None:
    server = await start_server()
    replica = await start_server("--replicaof", "127.0.0.1", str(server.port))
    store = await make(replica, up=False)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await bench_of(store).wait_up()
    assert await store.open(ID_A) == Opened(0, None)


async def test_a_server_without_memory_still_gives_what_it_has(make: Make, start_server: Any) -> None:
    server = await start_server("--maxmemory-policy", "noeviction")
    store = await make(server)
    await store.leave(ID_A)
    await store.leave(ID_B, host="kept")
    with_memory = await store.open(HISTORY_1)
    with server.client() as client:
        client.config_set("maxmemory", "1")
        assert await store.found(ID_A) is not None
        assert await store.put(with_memory, [HISTORY_1]) is PutResult.UNAVAILABLE
        nothing = await store.open(HISTORY_1)
        assert (nothing.found, nothing.ticket) == (None, None)
        assert await store.found(ID_B) == "kept"
        client.config_set("maxmemory", "0")
    assert await store.leave(ID_A) is PutResult.STORED
    assert bench_of(store).count("failures_total", operation="put", kind="out_of_memory") == 1
    assert bench_of(store).count("failures_total", operation="open", kind="out_of_memory") == 1
    assert bench_of(store).store.up


async def test_a_password_is_read_again_when_it_was_wrong(
    make: Make, start_server: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start_server("--requirepass", "canary-right")
    path = written(tmp_path, "password", "canary-wrong\n")
    with caplog.at_level("DEBUG"):
        store = await make(server, up=False, password_file=path)

        async def told() -> bool:
            return "auth" in caplog.text

        await until(told)
        assert await store.open(ID_A) == Opened(0, None)
        written(tmp_path, "password", "canary-right\n")
        await bench_of(store).wait_up()
    assert await store.leave(ID_A) is PutResult.STORED
    assert "canary" not in caplog.text


async def test_the_rights_that_the_page_names_are_enough(make: Make, start_server: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "router" / "README.md").read_text(encoding="utf-8")
    [words] = re.findall(r"`(~pd:\* -@all [^`]+)`", page)
    rights = words.split()
    server = await start_server()
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", "pd", "on", ">secret", *rights)
    store = await make(server, username="pd", password_file=written(tmp_path, "password", "secret"))
    assert await store.leave(HISTORY_1, ID_A) is PutResult.STORED
    assert await store.found(ID_A) is not None
    await store.leave(ID_A)
    await store.leave(ID_A)
    await store.forget(ID_A)
    assert await store.found(ID_A) is None


async def test_tls_is_checked(make: Make, start_server: Any, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / name) for name in ("cert", "key", "ca", "stranger")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["stranger"])
    tls = ["--tls-cert-file", files["cert"], "--tls-key-file", files["key"], "--tls-auth-clients", "no"]
    server = await start_server(tls=tls)
    store = await make(server, ca_file=files["ca"])
    assert await store.leave(ID_A) is PutResult.STORED
    assert await store.found(ID_A) is not None
    other = await make(server, up=False, ca_file=files["stranger"])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await bench_of(other).wait_up()


async def test_scripts_that_the_server_forgot_are_sent_again(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server)
    for _ in range(2):
        assert await store.leave(ID_A) is PutResult.STORED
        assert await store.found(ID_A) is not None
        with server.client() as client:
            client.script_flush()
    assert store.stats.fates[Fate.TAKEN] == 2


async def test_a_connection_that_the_server_closed_is_not_used(make: Make, start_server: Any) -> None:
    server = await start_server()
    store = await make(server)
    await store.leave(ID_A)
    with server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def noticed() -> bool:
        return not any(link.usable for link in bench_of(store).store._client._idle)

    await until(noticed, pause=0.0)
    assert await store.found(ID_A) is not None


# -- what stands in the store ------------------------------------------------------------------------
def _put_garbage(bench: ValkeyBench, kind: bytes, value: bytes | list[bytes]) -> int:
    """Put a value in the place of all keys of a kind; how many there were."""
    names = [key for key in bench.names() if key.startswith(bench.prefix + kind)]
    with bench.server.client() as client:
        for name in names:
            client.delete(name)
            if isinstance(value, list):
                client.rpush(name, *value)
            else:
                client.set(name, value, px=60_000)
    return len(names)


@pytest.mark.parametrize("kind", [b"e", b"k", b"l", b"s"])
@pytest.mark.parametrize(
    "value", [b"", b"garbage", b"1|2|3|4|\n{}\n{}", b"9" * 400, b"\x00\xff\n\n\n", [b"a", b"list"]], ids=repr
)
async def test_a_foreign_value_is_a_miss_and_harms_nobody(make: Make, kind: bytes, value: Any) -> None:
    store = await make()
    await store.leave(HISTORY_1, ID_A)
    await store.open(ID_A, ID_B)
    await store.leave(HISTORY_1, ID_A)
    assert _put_garbage(bench_of(store), kind, value) > 0
    taken = await store.found(HISTORY_1, ID_A, ID_B)
    assert taken is None or kind == b"l", "an id's newest turn says nothing about a handle that is there"
    assert await store.leave(ID_B) in (PutResult.STORED, PutResult.LATE)
    assert await store.leave(HISTORY_1) is PutResult.STORED
    assert await store.found(HISTORY_1) is not None


async def test_an_entry_with_a_malformed_handle_is_a_miss(make: Make) -> None:
    store = await make()
    bench = bench_of(store)
    await store.leave(ID_A)
    [name] = [key for key in bench.names() if key.startswith(bench.prefix + b"e")]
    with bench.server.client() as client:
        value = client.get(name)
        assert isinstance(value, bytes)
        client.set(name, value.replace(b'"remote_port":5600', b'"remote_port":"x"'), px=60_000)
    assert await store.found(ID_A) is None
    assert bench.count("failures_total", operation="open", kind="damaged") == 1


async def test_a_handle_that_was_laid_under_another_tenants_key_is_a_miss(make: Make) -> None:
    """Who can write to the server and has no key still makes nobody read somebody else's memory."""
    store = await make()
    bench = bench_of(store)
    await store.leave(ID_A, host="a")
    await store.leave(ID_B, host="b")
    first, second = bench.names(b"e")
    with bench.server.client() as client:
        values = [client.get(name) for name in (first, second)]
        for name, value in ((first, values[1]), (second, values[0])):
            assert isinstance(value, bytes)
            client.set(name, value, keepttl=True)
    assert await store.found(ID_A) is None
    assert await store.found(ID_B) is None
    assert bench.count("failures_total", operation="open", kind="damaged") == 2


async def test_an_oversized_value_is_not_even_sent(make: Make) -> None:
    store = await make(max_entry_bytes=10_000)
    await store.leave(ID_A)
    _put_garbage(bench_of(store), b"e", b"x" * 20_000)
    assert await store.found(ID_A) is None
    assert not [key for key in bench_of(store).names() if key.startswith(bench_of(store).prefix + b"e")]
    assert bench_of(store).count("failures_total", operation="open", kind="damaged") == 1


async def test_a_clock_that_is_set_back_ends_the_era(make: Make) -> None:
    store = await make()
    bench = bench_of(store)
    await store.leave(ID_A)
    opened = await store.open(HISTORY_1)
    with bench.server.client() as client:
        # As if the clock had been a minute ahead until now.
        ahead = int(client.hget(bench.prefix + b"s", "clock") or 0) + 60_000
        client.hset(bench.prefix + b"s", "clock", ahead)
    assert await store.put(opened, [HISTORY_1]) is PutResult.LATE
    assert await store.found(ID_A) is None
    assert await store.leave(ID_A, host="after") is PutResult.STORED
    assert await store.found(ID_A) == "after"


async def test_a_store_that_was_emptied_begins_anew(make: Make) -> None:
    store = await make()
    bench = bench_of(store)
    for _ in range(5):
        opened = await store.open(ID_A)
    with bench.server.client() as client:
        client.delete(*bench.names())
    newer = await store.open(ID_A)
    assert newer.turn < opened.turn
    assert await store.put(opened, [ID_A], host="old") is PutResult.LATE
    assert await store.put(newer, [ID_A], host="new") is PutResult.STORED
    assert await store.found(ID_A) == "new"


async def test_every_key_ends_by_itself_and_tells_nothing(make: Make) -> None:
    store = await make(realm="secret-namespace/secret-name")
    bench = bench_of(store)
    await store.leave(HISTORY_1, ID_A)
    await store.open(ID_B)
    keys = bench.names()
    with bench.server.client() as client:
        assert len(keys) == 1 + 1 + 2 + 1
        for key in keys:
            assert 0 < int(client.pttl(key)) <= 86_400_000, key
            assert b"secret" not in key
        lives = [int(client.pttl(key)) for key in keys if key.startswith((bench.prefix + b"e", bench.prefix + b"k"))]
    assert max(lives) <= 450_000
