"""Leases of a fake engine: what a router can do to them, and that no answer depends on one."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from pd_wire import lease, names
from support.fake_engine import FakeEngine, expected_answer
from support.legs import hand_turn

LONG = "The quick brown fox jumps over the lazy dog while the band plays on and on. " * 3


def body(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"model": "tiny", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


async def call(engine: FakeEngine, *items: tuple[Any, Any], method: str = "POST") -> tuple[int, Any]:
    said = {"leases": [{"token": token, "seconds": seconds} for token, seconds in items]}
    url = engine.url + names.LEASES_PATH
    async with aiohttp.ClientSession() as session, session.request(method, url, json=said) as response:
        return response.status, await response.json()


def left(answer: Any) -> list[int]:
    return [one["seconds"] for one in answer["leases"]]


def promised(handle: Any) -> lease.Lease:
    found = lease.parse(handle[names.LEASE_KEY])
    assert found is not None
    return found


async def test_a_promise_is_prolonged_shortened_ended_and_runs_out(make_pair: Any) -> None:
    pair = await make_pair(retention="Leased")
    turns = [await hand_turn(pair.prefill, pair.decode, body(f"{number} {LONG}")) for number in range(2)]
    one, other = (promised(turn.handle) for turn in turns)
    held = pair.decode.used_blocks
    assert held > 0
    status, answer = await call(pair.decode, (one.token, 600), ("f" * 32, 60), (other.token, 5))
    assert (status, left(answer)) == (200, [600, 0, 5])
    pair.clock.advance(6.0)
    assert pair.decode.leases().keys() == {one.token}
    status, answer = await call(pair.decode, (other.token, 60), (one.token, 0))
    assert (status, left(answer)) == (200, [0, 0])
    assert pair.decode.used_blocks == 0
    # What is no longer promised is there all the same, as long as nobody needs its room.
    for number, turn in enumerate(turns):
        more = body(f"{number} {LONG}", turn.text or "", "And then?")
        again = await hand_turn(pair.prefill, pair.decode, more, handle=turn.handle)
        assert pair.prefill.generates[-1].pulled_tokens
        right = expected_answer(pair.decode.config.template.render(more), model="tiny", body=more)
        assert again.text == right.content


async def test_no_more_is_promised_than_the_share(make_pair: Any) -> None:
    pair = await make_pair(retention="Leased", blocks=200, lease_share=0.1)
    turns = [await hand_turn(pair.prefill, pair.decode, body(f"{number} {LONG}")) for number in range(4)]
    handles = [turn.handle or {} for turn in turns]
    given = [names.LEASE_KEY in handle for handle in handles]
    assert given[0]
    assert not given[-1]
    assert all(handle[names.MODE_KEY] == names.MODE_LEASED for handle in handles)


async def test_a_request_never_waits_for_a_promise(make_pair: Any) -> None:
    pair = await make_pair(retention="Leased", blocks=48, lease_share=0.9, prefix_caching=False)
    for number in range(8):
        await hand_turn(pair.prefill, pair.decode, body(f"{number} {LONG}"))
    assert pair.decode.connector.counters["waits_for_blocks"] == 0
    assert 0 < len(pair.decode.leases()) < 8


@pytest.mark.parametrize(
    ("items", "method", "status"),
    [
        ([], "POST", 400),
        ([("short", 60)], "POST", 400),
        ([("A" * 32, 60)], "POST", 400),
        ([("a" * 32, 3601)], "POST", 400),
        ([("a" * 32, -1)], "POST", 400),
        ([("a" * 32, 1.5)], "POST", 400),
        ([("a" * 32, True)], "POST", 400),
        ([(f"{number:032x}", 1) for number in range(lease.MAX_BATCH + 1)], "POST", 400),
        ([("a" * 32, 60), ("a" * 32, 0)], "POST", 200),
        ([("a" * 32, 60)], "PUT", 405),
    ],
)
async def test_what_no_router_may_send_is_a_violation(make_pair: Any, items: Any, method: str, status: int) -> None:
    pair = await make_pair(retention="Leased")
    assert (await call(pair.decode, *items, method=method))[0] == status
    assert len(pair.fabric.take_violations()) == 1
