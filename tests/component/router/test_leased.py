"""Leases: kept alive while a conversation is, ended when it is over, and never a reason for a turn to wait or fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
from multidict import CIMultiDict

from pd_wire import names
from support.chat import TEXT, Talk, send
from support.deployment import Deployment, Spec
from support.fake_engine import AnswerStyle, Behaviour, FakeEngine, Fault, Gate, Kind, LeaseFault, Point
from support.redis_server import RedisServer
from support.shared_deployment import SharedDeployment, say_on
from support.waiting import until

SECONDS = 3
CONNECTOR = (("retention", "Leased"), ("lease_seconds", SECONDS))
LEASED = Spec(connector=CONNECTOR)
LONG = (("retention", "Leased"), ("lease_seconds", 600))
"""Leases that end before a test does only because a router says so."""
LASTING = Spec(connector=LONG, flags=(("--lease-heartbeat", "0.3"),))
CALLS = AnswerStyle(calls_tool=True)
PARAMETERS = {"type": "object", "properties": {"kv": {"type": "string"}, "unit": {"type": "string"}}}
HOLD, END = "X-Conversation-Hold", "X-Conversation-End"


async def lease_of(deployment: Deployment, talk: Talk, text: str = TEXT, **more: Any) -> str:
    """Say something; the token of the lease that the turn left."""
    before = deployment.fabric.tokens.copy()
    await talk.say(text, **more)
    [token] = deployment.fabric.tokens - before
    return token


def renewals(engine: FakeEngine, token: str) -> int:
    """How often the engine prolonged it."""
    return sum(call.left.get(token, 0) > 0 for call in engine.lease_calls)


def was_ended(engine: FakeEngine, token: str) -> bool:
    return any(call.asked.get(token) == 0 for call in engine.lease_calls)


async def renewed(engine: FakeEngine, token: str, times: int = 2) -> None:
    async def seen() -> bool:
        return renewals(engine, token) >= times

    await until(seen, 20.0)


async def ended(engine: FakeEngine, token: str) -> None:
    """Wait until the router has ended it; not that it ran out."""

    async def seen() -> bool:
        return was_ended(engine, token) and token not in engine.leases()

    await until(seen, 20.0)


async def ran_out(engine: FakeEngine, token: str) -> None:
    async def seen() -> bool:
        return token not in engine.leases()

    await until(seen, 20.0)
    assert not was_ended(engine, token)


@asynccontextmanager
async def growing(deployment: Deployment, name: str) -> AsyncIterator[None]:
    """A counter of the router grows in the meantime, or soon after."""
    before = (await deployment.metrics()).get(name, 0.0)
    yield

    async def grown() -> bool:
        return (await deployment.metrics()).get(name, 0.0) > before

    await until(grown)


async def delete(
    deployment: Deployment, name: str, headers: Mapping[str, str], method: str = "DELETE"
) -> tuple[int, Any]:
    url = f"{deployment.router.url}/v1/conversations/{name}"
    async with aiohttp.ClientSession() as session, session.request(method, url, headers=headers) as response:
        raw = await response.read()
        deployment.seen.append(raw)
        return response.status, await response.json()


# -- rights ------------------------------------------------------------------------------------------
async def test_while_a_turn_runs_and_then_the_next_ones_is_enough(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    talk = Talk(deployment)
    first = await lease_of(deployment, talk)
    assert renewals(deployment.decode, first) == 0
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    async with growing(deployment, 'pd_router_leases_released_total{reason="superseded"}'):
        turn = asyncio.create_task(lease_of(deployment, talk, "Go on.", stream=True))
        await gate.reached.wait()
        await renewed(deployment.decode, first, 3)
        assert (await deployment.metrics())["pd_router_leases_kept"] >= 1
        assert first in deployment.decode.leases()
        gate.open()
        second = await turn
        await ended(deployment.decode, first)
    await ran_out(deployment.decode, second)
    assert renewals(deployment.decode, second) == 0
    assert (await talk.say("And then?")).pulled
    told = (await deployment.explain())[-2:]
    assert [one["lease_seconds"] for one in told] == [SECONDS, SECONDS]
    assert all("lease_kept" not in one for one in told)


async def test_while_prefill_works(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    talk = Talk(deployment)
    first = await lease_of(deployment, talk)
    hold = asyncio.Event()
    deployment.prefill.next(Behaviour(hold=hold))
    turn = asyncio.create_task(talk.say("Go on."))
    await renewed(deployment.decode, first)
    hold.set()
    await turn
    await ended(deployment.decode, first)


async def test_every_branch_holds_what_it_runs_on(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    talk = Talk(deployment, conversation_id="branches")
    first = await lease_of(deployment, talk)
    gate = Gate(1)
    deployment.decode.next(Behaviour(gate=gate))
    slow = asyncio.create_task(send(deployment, talk.body("Slowly.", stream=True), talk.headers))
    await gate.reached.wait()
    await talk.say("Go on.")
    already = renewals(deployment.decode, first)
    await renewed(deployment.decode, first, already + 2)
    gate.open()
    await slow
    await ended(deployment.decode, first)


def tools_of(api: str) -> list[Any]:
    match api:
        case "chat":
            return [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
        case "responses":
            return [{"type": "function", "name": "get_weather", "strict": False, "parameters": PARAMETERS}]
    return [{"name": "get_weather", "input_schema": PARAMETERS}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("api", "path", "prompt"),
    [
        ("chat", "/v1/chat/completions", "messages"),
        ("responses", "/v1/responses", "input"),
        ("messages", "/v1/messages", "messages"),
    ],
)
async def test_after_an_answer_that_calls_tools(deploy: Any, api: str, path: str, prompt: str, stream: bool) -> None:
    deployment = await deploy(LEASED)
    deployment.decode.default = Behaviour(style=CALLS)
    name = f"tools-{api}-{stream}"
    headers = {"Authorization": f"Bearer sk-{name}", "X-Conversation-ID": name}
    body: dict[str, Any] = {"model": "tiny", "stream": stream, prompt: [{"role": "user", "content": f"{name} {TEXT}"}]}
    if api == "messages":
        body["max_tokens"] = 200
    before = deployment.fabric.tokens.copy()
    turn = await send(deployment, {**body, "tools": tools_of(api)}, headers, path=path)
    assert turn.status == 200
    assert b"get_weather" in turn.raw
    [token] = deployment.fabric.tokens - before
    await renewed(deployment.decode, token, 3)
    assert (await deployment.explain())[-1]["lease_kept"] == "tools 600 s"
    assert await delete(deployment, name, headers) == (
        200,
        {"id": name, "object": "conversation.deleted", "deleted": True},
    )
    await ended(deployment.decode, token)


async def test_tools_that_are_not_answered_in_time(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--lease-tool-hold", "4"),)))
    deployment.decode.default = Behaviour(style=CALLS)
    talk = Talk(deployment, tools=tools_of("chat"), style=CALLS)
    token = await lease_of(deployment, talk)
    await renewed(deployment.decode, token)
    await ran_out(deployment.decode, token)
    assert (await deployment.metrics())["pd_router_leases_kept"] == 0


async def test_as_long_as_the_client_asks_for(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    talk = Talk(deployment, headers={HOLD: "5"})
    token = await lease_of(deployment, talk)
    await renewed(deployment.decode, token)
    assert (await deployment.explain())[-1]["lease_kept"] == "hold 5 s"
    await ran_out(deployment.decode, token)
    assert deployment.decode.generates[-1].header(HOLD) is None
    assert deployment.prefill.generates[-1].header(HOLD) is None


@pytest.mark.parametrize("header", [HOLD, HOLD.lower(), HOLD.upper()])
async def test_a_client_that_wants_none_gets_none_and_still_reuses(deploy: Any, header: str) -> None:
    deployment = await deploy(LASTING)
    talk = Talk(deployment, headers={header: "0"})
    async with growing(deployment, 'pd_router_leases_released_total{reason="declined"}'):
        token = await lease_of(deployment, talk)
        await ended(deployment.decode, token)
    assert (await talk.say("Go on.")).pulled


async def test_a_short_hold_ends_a_long_lease(deploy: Any) -> None:
    deployment = await deploy(LASTING)
    token = await lease_of(deployment, Talk(deployment, headers={HOLD: "1"}))
    await ran_out(deployment.decode, token)
    assert renewals(deployment.decode, token) == 1


@pytest.mark.parametrize(
    ("header", "value", "allowed"),
    [
        *(
            (HOLD, value, "a whole number of seconds from 0 to 3600")
            for value in ("-1", "3601", "1.5", "soon", "", "99999")
        ),
        *((END, value, "true or false") for value in ("yes", "1", "")),
    ],
)
async def test_a_wish_that_cannot_be_read_is_refused(deploy: Any, header: str, value: str, allowed: str) -> None:
    deployment = await deploy(LEASED)
    turn = await send(deployment, Talk(deployment).body(TEXT), {header.swapcase(): value})
    assert turn.status == 400
    assert turn.json["error"]["message"] == f"{header} must be {allowed}"
    assert turn.json["error"]["param"] == header
    assert deployment.records() == []


@pytest.mark.parametrize("header", [HOLD, END])
async def test_a_wish_that_comes_twice_is_refused(deploy: Any, header: str) -> None:
    deployment = await deploy(LEASED)
    twice = CIMultiDict([(header, "true"), (header, "false")])
    url = f"{deployment.router.url}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=Talk(deployment).body(TEXT), headers=twice) as response,
    ):
        assert response.status == 400
        assert f"two {header.lower()} headers" in (await response.json())["error"]["message"]
    assert deployment.records() == []


async def test_a_wish_that_cannot_be_read_is_refused_in_the_apis_own_words(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi."}]}
    turn = await send(deployment, body, {HOLD: "x"}, path="/v1/messages")
    assert turn.status == 400
    assert turn.json["type"] == "error"
    assert turn.json["error"]["type"] == "invalid_request_error"
    assert turn.json["error"]["message"].startswith(f"{HOLD} must be ")


async def test_each_data_parallel_rank_keeps_its_own(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=CONNECTOR, engine=(("ranks", 2),)))
    talks = [Talk(deployment, headers={HOLD: "60"}, conversation_id=f"rank {number}") for number in range(4)]
    tokens = [await lease_of(deployment, talk) for talk in talks]
    assert len({record.rank for record in deployment.decode.generates}) == 2
    for token in tokens:
        await renewed(deployment.decode, token)
    for talk, token in zip(talks, tokens, strict=True):
        await delete(deployment, talk.fields["conversation_id"].replace(" ", "%20"), talk.headers)
        await ended(deployment.decode, token)


# -- ends --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("link", [{}, {"session_id": "last-turn"}])
async def test_the_last_turn_leaves_nothing(deploy: Any, link: dict[str, Any], stream: bool) -> None:
    deployment = await deploy(LASTING)
    talk = Talk(deployment, stream=stream, **link)
    first = await lease_of(deployment, talk)
    given = deployment.fabric.tokens.copy()
    talk.headers[END] = "True"
    async with growing(deployment, 'pd_router_leases_released_total{reason="ended"}'):
        turn = await talk.say("Good bye.")
        await ended(deployment.decode, first)
    assert len(turn.attached) == 1
    assert turn.decodes[0].params[names.RETAIN_KEY] is False
    assert turn.decodes[0].header(END) is None
    assert deployment.fabric.tokens == given
    assert (await deployment.explain())[-1]["conversation"] == "ended"
    talk.headers[END] = "false"
    assert (await talk.say("One more thing.")).attached == []


async def test_a_last_turn_that_fails_ends_nothing(deploy: Any) -> None:
    deployment = await deploy(LASTING)
    talk = Talk(deployment)
    first = await lease_of(deployment, talk)
    deployment.decode.next(Behaviour(fault=Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 400)))
    turn = await send(deployment, talk.body("Good bye."), {**talk.headers, END: "true"})
    assert turn.status == 400
    assert first in deployment.decode.leases()
    assert (await talk.say("Good bye.")).attached


@pytest.mark.parametrize("name", ["plain", "with space/and slash", "ünïcode"])
async def test_the_official_client_deletes_a_conversation(deploy: Any, name: str) -> None:
    deployment = await deploy(LASTING)
    key = f"sk-deletes-{name}".encode().hex()
    talk = Talk(deployment, conversation_id=name, headers={"Authorization": f"Bearer {key}"})
    token = await lease_of(deployment, talk)
    async with openai.AsyncOpenAI(base_url=deployment.router.url + "/v1", api_key=key, max_retries=0) as client:
        for _ in range(2):
            answer = await client.conversations.delete(name)
            assert (answer.id, answer.object, answer.deleted) == (name, "conversation.deleted", True)
    await ended(deployment.decode, token)
    assert (await talk.say("Are you there?")).attached == []


async def test_nobody_deletes_what_is_somebody_elses(deploy: Any) -> None:
    deployment = await deploy(LASTING)
    talk = Talk(deployment, conversation_id="mine alone")
    token = await lease_of(deployment, talk)
    for headers in ({"Authorization": "Bearer sk-somebody-else"}, {}):
        status, answer = await delete(deployment, "mine%20alone", headers)
        assert (status, answer["deleted"]) == (200, True)
    assert token in deployment.decode.leases()
    turn = await talk.say("Still mine?")
    assert len(turn.attached) == 1


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_conversations_can_only_be_deleted(deploy: Any, method: str) -> None:
    deployment = await deploy(LASTING)
    status, answer = await delete(deployment, "some", {}, method)
    assert (status, answer["error"]["code"]) == (405, "bad_method")
    for name in ("", "some/items"):
        status, answer = await delete(deployment, name, {}, method)
        assert (status, answer["error"]["code"]) == (404, "unknown_path")


async def test_a_conversation_with_other_options_ends_with_it(deploy: Any) -> None:
    """An agent and its helper, with other tools, under one id."""
    deployment = await deploy(LASTING)
    headers = {"Authorization": "Bearer sk-two-scopes"}
    one = Talk(deployment, conversation_id="both", headers=headers)
    other = Talk(deployment, conversation_id="both", headers=headers, tools=tools_of("chat"))
    tokens = [await lease_of(deployment, one), await lease_of(deployment, other)]
    await delete(deployment, "both", headers)
    for token in tokens:
        await ended(deployment.decode, token)


async def test_what_the_store_has_no_room_for_is_let_go(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=LONG, flags=(("--handle-cap-entries", "2"),)))
    async with growing(deployment, 'pd_router_leases_released_total{reason="evicted"}'):
        tokens = [await lease_of(deployment, Talk(deployment)) for _ in range(3)]
        await ended(deployment.decode, tokens[0])
    assert set(tokens[1:]) <= set(deployment.decode.leases())


async def test_what_is_too_old_is_let_go(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=LONG, flags=(("--unpinned-handle-ttl", "1"),)))
    async with growing(deployment, 'pd_router_leases_released_total{reason="expired"}'):
        token = await lease_of(deployment, Talk(deployment))
        await ended(deployment.decode, token)


async def test_a_handle_outlives_the_timer_that_its_engine_does_not_have(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--handle-ttl", "0.5"), ("--engine-ttl", "11"))))
    talk = Talk(deployment)
    token = await lease_of(deployment, talk)
    await ran_out(deployment.decode, token)
    turn = await talk.say("Go on.")
    assert turn.pulled


async def test_a_turn_without_a_lease_is_as_with_unpinned(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=(*CONNECTOR, ("lease_share", 0.00001))))
    talk = Talk(deployment, headers={HOLD: "60"})
    await talk.say()
    assert (await talk.say("Go on.")).pulled
    assert deployment.decode.lease_calls == []
    assert (await deployment.explain())[-1].get("lease_seconds") is None


# -- failures ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", LeaseFault)
async def test_an_engine_that_does_not_do_as_it_is_told_costs_no_turn(deploy: Any, fault: LeaseFault) -> None:
    deployment = await deploy(LEASED)
    decode = deployment.decode
    talk = Talk(deployment, headers={HOLD: "60"})
    first = await lease_of(deployment, talk)
    decode.lease_fault = fault
    logged = deployment.router.log.count("does not prolong leases")
    figures = await deployment.metrics()

    async def noticed() -> bool:
        now = await deployment.metrics()
        names = [name for name in now if name.startswith(("pd_router_lease_failures_total", "pd_router_leases_lost"))]
        return sum(now[name] - figures[name] for name in names) > 0

    async def asked() -> bool:
        return any(first in call.asked for call in decode.lease_calls)

    await until(asked, 20.0)
    await until(noticed, 20.0)
    second = await lease_of(deployment, talk, "Go on.")

    async def asked_again() -> bool:
        return any(second in call.asked for call in decode.lease_calls)

    await until(asked_again, 30.0)
    assert deployment.router.log.count("does not prolong leases") <= logged + 1
    decode.lease_fault = None

    async def works_again() -> bool:
        third = await lease_of(deployment, talk, "And then?")
        await asyncio.sleep(SECONDS / 2)
        return renewals(decode, third) > 0

    await until(works_again, 30.0)


async def test_a_restarted_engine_is_told_nothing_of_the_one_before(deploy: Any) -> None:
    deployment = await deploy(LEASED, breaks=True)
    talk = Talk(deployment, headers={HOLD: "60"})
    before = await lease_of(deployment, talk)
    await renewed(deployment.decode, before, 1)
    await deployment.decode.restart()
    await deployment.wait_ready(2)
    deployment.decode.lease_calls.clear()
    after = await lease_of(deployment, talk, "Go on.")
    await renewed(deployment.decode, after)
    assert all(before not in call.asked for call in deployment.decode.lease_calls)


async def test_an_engine_that_is_away_costs_no_turn(deploy: Any) -> None:
    deployment = await deploy(Spec(decodes=2, connector=CONNECTOR), breaks=True)
    talk = Talk(deployment, headers={HOLD: "60"})
    await talk.say()
    holder = next(engine for engine in deployment.decodes if engine.leases())
    await holder.kill()
    await deployment.wait_ready(2)
    assert (await talk.say("Go on.")).status == 200
    await holder.start()


async def test_without_the_router_they_run_out(deploy: Any) -> None:
    deployment = await deploy(LEASED, fresh=True)
    talk = Talk(deployment, headers={HOLD: "600"})
    token = await lease_of(deployment, talk)
    await renewed(deployment.decode, token)
    await deployment.router.stop()
    deployment.ended = True
    await ran_out(deployment.decode, token)


async def test_the_engines_key_is_shown(deploy: Any, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("sk-canary-of-the-engines\n")
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--engine-api-key-file", str(path)),)), fresh=True)
    token = await lease_of(deployment, Talk(deployment, headers={HOLD: "60"}))
    await renewed(deployment.decode, token, 1)
    assert deployment.decode.lease_calls[-1].headers["authorization"] == "Bearer sk-canary-of-the-engines"


async def test_no_credential_of_a_client_goes_with_it(deploy: Any) -> None:
    deployment = await deploy(LEASED)
    token = await lease_of(deployment, Talk(deployment, headers={HOLD: "60"}))
    await renewed(deployment.decode, token, 1)
    assert "authorization" not in deployment.decode.lease_calls[-1].headers


# -- what one tenant may have prolonged --------------------------------------------------------------
@pytest.mark.parametrize("flags", [(), (("--workers", "2"),)], ids=["one process", "workers"])
@pytest.mark.parametrize("right", ["hold", "tools"])
async def test_a_tenant_at_its_limit_gets_nothing_prolonged(
    deploy: Any, right: str, flags: tuple[tuple[str, str], ...]
) -> None:
    probe = await deploy(LEASED)
    usage = (await Talk(probe).say()).json["usage"]
    limit = int(usage["prompt_tokens"] * 2.5) + usage["completion_tokens"] + 200
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--tenant-retained-tokens", str(limit)), *flags)))
    more: dict[str, Any] = {"headers": {HOLD: "600"}}
    if right == "tools":
        deployment.decode.default = Behaviour(style=CALLS)
        more = {"tools": tools_of("chat"), "style": CALLS}

    def talk(name: str, tenant: str) -> Talk:
        return Talk(deployment, tenant=f"{tenant}-{right}-{flags}".encode().hex(), conversation_id=name, **more)

    limited = 'pd_router_tenant_limited_total{limit="tenant_retained_limit"}'
    first = talk("first", "hoarder")
    before = (await deployment.metrics())[limited]
    tokens = [await lease_of(deployment, first)]
    while (await deployment.metrics())[limited] == before:
        tokens.append(await lease_of(deployment, talk(f"more {len(tokens)}", "hoarder")))
        assert len(tokens) < 20
    *held, refused = tokens
    assert held
    [told, *_] = [one for one in reversed(await deployment.explain()) if "lease_not_kept" in one]
    assert (told["lease_not_kept"], told.get("lease_kept")) == ("tenant_retained_limit", None)
    assert told["lease_seconds"] == SECONDS
    other = await lease_of(deployment, talk("other", "modest"))
    await ran_out(deployment.decode, refused)
    assert renewals(deployment.decode, refused) == 0
    for token in (*held, other):
        await renewed(deployment.decode, token, 2)
    # Who ends a conversation has room for another.
    await delete(deployment, "first", first.headers)
    await ended(deployment.decode, held[0])
    async with growing(deployment, "pd_router_leases_renewed_total"):
        last = await lease_of(deployment, talk("last", "hoarder"))
        await renewed(deployment.decode, last)


async def test_a_conversation_that_goes_on_counts_once(deploy: Any) -> None:
    """And not at all once it is over."""
    probe = await deploy(LEASED)
    usage = (await Talk(probe).say()).json["usage"]
    limit = int(usage["prompt_tokens"] * 1.5) + 10 * (usage["completion_tokens"] + 40)
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--tenant-retained-tokens", str(limit)),)))
    for ending in ("delete", "header", "none"):
        talk = Talk(deployment, tenant="goes-on", conversation_id=f"on-{ending}", headers={HOLD: "600"})
        for text in (TEXT, "Go on.", "On.", "And then?"):
            token = await lease_of(deployment, talk, text)
            await renewed(deployment.decode, token, 1)
            assert (await deployment.explain())[-1]["lease_kept"] == "hold 600 s"
        if ending == "delete":
            await delete(deployment, talk.fields["conversation_id"], talk.headers)
        elif ending == "header":
            talk.headers[END] = "true"
            await talk.say("Good bye.")
        else:
            talk.headers[HOLD] = "0"
            await talk.say("Go on.")


# -- ids that are no ASCII -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "path"), [("ünï", "%C3%BCn%C3%AF"), ("ünï", "%FCn%EF"), ("会話", "%E4%BC%9A%E8%A9%B1")]
)
async def test_an_id_in_a_header_is_the_one_in_a_path_and_in_a_body(deploy: Any, name: str, path: str) -> None:
    deployment = await deploy(LASTING)
    headers = {"Authorization": f"Bearer sk-{path}"}
    first = await lease_of(deployment, Talk(deployment, headers={**headers, "X-Conversation-ID": name}))
    # Without a word in common, so that the id alone leads there.
    other = Talk(deployment, headers=headers, conversation_id=name)
    second = await lease_of(deployment, other)
    await ended(deployment.decode, first)
    third = await lease_of(deployment, Talk(deployment, headers={**headers, "X-Conversation-ID": name}))
    await ended(deployment.decode, second)
    status, answer = await delete(deployment, path, headers)
    assert (status, answer) == (200, {"id": name, "object": "conversation.deleted", "deleted": True})
    await ended(deployment.decode, third)
    for leg in (deployment.prefill, deployment.decode):
        assert leg.generates[-1].header("X-Conversation-ID") is None


# -- several -----------------------------------------------------------------------------------------
WORKERS = Spec(connector=CONNECTOR, flags=(("--workers", "2"), ("--handle-cap-entries", "3")))


async def test_workers_are_one_router(deploy: Any) -> None:
    deployment = await deploy(WORKERS)
    talk = Talk(deployment, conversation_id="workers", headers={HOLD: "60"})
    tokens = [await lease_of(deployment, talk, text) for text in (TEXT, "Go on.", "On.", "And then?", "And?")]
    for token in tokens[:-1]:
        await ended(deployment.decode, token)
    await renewed(deployment.decode, tokens[-1])
    status = await status_of(deployment)
    assert status["leases"]["renewed"] >= 2
    assert status["leases"]["released"] >= 4
    assert [one["retention"] for one in status["engines"] if one["role"] == "decode"] == ["Leased"]
    await delete(deployment, "workers", talk.headers)
    await ended(deployment.decode, tokens[-1])


async def test_a_conversation_that_goes_from_worker_to_worker_is_not_lost(deploy: Any) -> None:
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--workers", "4"),)), fresh=True)
    talks = [Talk(deployment, conversation_id=f"lost {number}", headers={HOLD: "60"}) for number in range(6)]
    for text in (TEXT, "Go on.", "On.", "And then?"):
        tokens = [await lease_of(deployment, talk, text) for talk in talks]
        for token in tokens:
            await renewed(deployment.decode, token, 1)

    async def forgotten() -> bool:
        """No worker prolongs any more what another one has ended."""
        return (await deployment.metrics())["pd_router_leases_kept"] == len(talks)

    await until(forgotten, 20.0)
    leases = (await status_of(deployment))["leases"]
    assert (leases["released"], leases["lost"]) == (18, 0)


async def test_of_what_the_supervisor_drops_a_worker_ends_the_lease(deploy: Any) -> None:
    deployment = await deploy(WORKERS)
    tokens = [await lease_of(deployment, Talk(deployment, headers={HOLD: "60"})) for _ in range(4)]
    await ended(deployment.decode, tokens[0])
    await renewed(deployment.decode, tokens[-1])


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_an_end_that_an_engine_misses_is_told_again(deploy: Any, workers: str) -> None:
    """Or another worker, which has not heard of it, would prolong it for as long as the client once asked."""
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--workers", workers),)), fresh=True)
    talks = [Talk(deployment, conversation_id=f"missed {number}", headers={HOLD: "600"}) for number in range(4)]
    tokens = [await lease_of(deployment, talk) for talk in talks]
    for token in tokens:
        await renewed(deployment.decode, token, 1)
    deployment.decode.lease_fault = LeaseFault.FAILS
    for talk in talks:
        await delete(deployment, str(talk.fields["conversation_id"]), talk.headers)
    await asyncio.sleep(0.5)
    deployment.decode.lease_fault = None
    for token in tokens:
        await ended(deployment.decode, token)
    leases = (await status_of(deployment))["leases"]
    assert (leases["released"], leases["lost"]) == (4, 0)


BYPASS = (("--bypass-tokens", "60"), ("--bypass-share", "0.5"), ("--bypass-decode-turns", "4"))


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_turn_that_leaves_no_handle_gives_the_lease_a_new_right(deploy: Any, workers: str) -> None:
    """Its word takes the place of the earlier one, whichever worker heard that."""
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--workers", workers), *BYPASS)), fresh=True)
    tokens = []
    for _ in range(6):
        talk = Talk(deployment, headers={HOLD: "3600"})
        tokens.append(await lease_of(deployment, talk))
        await renewed(deployment.decode, tokens[-1], 1)
        talk.headers[HOLD] = "1"
        assert not (await talk.say("Go on.")).attached
        told = (await deployment.explain())[-1]
        assert (told["reason"], told["lease_kept"]) == ("bypassed", "hold 1 s")
    for token in tokens:
        await ran_out(deployment.decode, token)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_the_same_turn_twice_at_a_time_holds_what_it_carries_on(deploy: Any, workers: str) -> None:
    deployment = await deploy(Spec(connector=CONNECTOR, flags=(("--workers", workers), *BYPASS)), fresh=True)
    talk = Talk(deployment, conversation_id="twice", headers={HOLD: "600"})
    token = await lease_of(deployment, talk)
    await renewed(deployment.decode, token, 1)
    body = talk.body("Go on.")
    await asyncio.gather(*(send(deployment, body, talk.headers) for _ in range(2)))
    # The one that began first may find its place taken.
    assert "hold 600 s" in [one.get("lease_kept") for one in (await deployment.explain())[-2:]]
    await renewed(deployment.decode, token, renewals(deployment.decode, token) + 3)
    assert not was_ended(deployment.decode, token)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_carried_lease_outlives_its_first_handle(deploy: Any, workers: str) -> None:
    flags = (("--workers", workers), ("--handle-cap-entries", "3"), *BYPASS)
    deployment = await deploy(Spec(connector=CONNECTOR, flags=flags), fresh=True)
    talk = Talk(deployment, headers={HOLD: "600"})
    token = await lease_of(deployment, talk)
    await talk.say("Go on.")
    async with growing(deployment, 'pd_router_handle_fates_total{fate="evicted"}'):
        for _ in range(2):
            await Talk(deployment).say()
    await renewed(deployment.decode, token, renewals(deployment.decode, token) + 3)
    assert not was_ended(deployment.decode, token)
    assert len((await talk.say(TEXT)).attached) == 1


async def status_of(deployment: Deployment) -> Any:
    async with aiohttp.ClientSession() as session, session.get(deployment.router.admin_url + "/status") as response:
        return await response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[SharedDeployment, SharedDeployment]]:
    server = RedisServer()
    first = SharedDeployment(Spec(connector=CONNECTOR), server, tmp_path_factory.mktemp("leased"))
    try:
        await server.start()
        await first.start()
        second = await first.join()
        for view in (first, second):
            await view.wait_store()
        yield first, second
        await first.check()
    finally:
        await first.stop()
        server.close()


async def test_whichever_router_supersedes_it_ends_it(pair: tuple[SharedDeployment, SharedDeployment]) -> None:
    one, other = pair
    talk = Talk(one, headers={HOLD: "60"})
    first = await lease_of(one, talk)
    await renewed(one.decode, first)
    before = one.fabric.tokens.copy()
    turn = await say_on(other, talk)
    [second] = one.fabric.tokens - before
    assert len(turn.attached) == 1
    await ended(one.decode, first)
    await renewed(one.decode, second)

    async def forgotten() -> bool:
        return (await one.metrics())["pd_router_leases_kept"] == 0

    await until(forgotten)


async def test_a_turn_on_another_router_holds_what_it_runs_on(pair: tuple[SharedDeployment, SharedDeployment]) -> None:
    one, other = pair
    talk = Talk(one)
    first = await lease_of(one, talk)
    gate = Gate(1)
    one.decode.next(Behaviour(gate=gate))
    talk.deployment = other
    turn = asyncio.create_task(talk.say("Go on.", stream=True))
    await gate.reached.wait()
    await renewed(one.decode, first, 3)
    gate.open()
    await turn
    await ended(one.decode, first)


async def test_any_router_ends_a_conversation(pair: tuple[SharedDeployment, SharedDeployment]) -> None:
    one, other = pair
    talk = Talk(one, conversation_id="everywhere", headers={HOLD: "60"})
    token = await lease_of(one, talk)
    status, answer = await delete(other, "everywhere", talk.headers)
    assert (status, answer["deleted"]) == (200, True)
    await ended(one.decode, token)
    assert (await say_on(one, talk)).attached == []


async def test_what_another_router_overwrites_is_ended_there(pair: tuple[SharedDeployment, SharedDeployment]) -> None:
    """Two conversations under one id, without a word in common: the second never finds the first's handle by history,
    takes it by its id, and leaves its own there."""
    one, other = pair
    name = {"conversation_id": "reused", "headers": {"Authorization": "Bearer sk-reused"}}
    token = await lease_of(one, Talk(one, **name))
    await lease_of(other, Talk(other, **name))
    await ended(one.decode, token)
