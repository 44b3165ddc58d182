"""From turn 2 on the handle is attached and the answer is right: by history, by each id, for each API and mode.

Aspects: what links two turns, who may be linked, what the engines receive, what happens to old handles. Not here:
prompts that do not continue (`test_unsafe_continuations`), time (`test_freshness`), failures.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.chat import TEXT, Talk, assert_right, send
from support.deployment import EXTRAS, Spec
from support.specs import TWO_BY_TWO

BODY_IDS = ("conversation_id", "session_id", "prompt_cache_key", "previous_response_id")
HEADER_IDS = ("X-Session-ID", "X-Conversation-ID")
SLACK = 40
"""Tokens of a turn that prefill computes itself besides the new message: the rest of a block, role marks."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["verified", "stock"])
async def test_history_links_turns(deploy: Any, mode: Any, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode))
    talk = Talk(deployment, stream=stream)
    turn = await talk.say()
    assert turn.attached == []
    for _ in range(3):
        before = turn.decodes[0]
        turn = await talk.say("And what happened then? Tell me more.")
        assert turn.attached == [before.request_id]
        assert turn.pulled >= (before.prompt_tokens or 0) - SLACK
        assert len(turn.prefills) == len(turn.decodes) == 1


@pytest.mark.parametrize("name", BODY_IDS)
async def test_a_body_id_links_turns_whose_history_does_not(deploy: Any, name: str) -> None:
    deployment = await deploy()
    ids: dict[str, Any] = {name: f"id-{name}"}
    talk = Talk(deployment, **ids)
    await talk.say()
    talk.messages[-1]["content"] = "Reworded by the client."
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    assert turn.pulled > 100


@pytest.mark.parametrize("name", HEADER_IDS)
async def test_a_header_id_links_turns_whose_history_does_not(deploy: Any, name: str) -> None:
    deployment = await deploy()
    talk = Talk(deployment, headers={name: f"id-{name}"}, stream=True)
    await talk.say()
    talk.messages[-1]["content"] = "Reworded by the client."
    turn = await talk.say("Go on.")
    assert len(turn.attached) == 1
    assert turn.pulled > 100


async def test_an_id_alone_is_not_enough_without_a_proof(deploy: Any) -> None:
    deployment = await deploy(Spec(mode="stock"))
    talk = Talk(deployment, conversation_id="same")
    await talk.say()
    talk.messages[-1]["content"] = "Reworded by the client."
    assert (await talk.say("Go on.")).attached == []


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_are_linked_by_id(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    headers = {"Authorization": "Bearer sk-canary-completions"}
    prompt = f"{stream} Once upon a time. {TEXT}"
    body = {"model": "tiny", "prompt": prompt, "stream": stream, "session_id": f"s-{stream}"}
    one = await send(deployment, body, headers)
    assert_right(deployment, one)
    two = await send(deployment, {**body, "prompt": f"{prompt}{one.text} And then {TEXT}"}, headers)
    assert_right(deployment, two)
    assert len(two.attached) == 1
    assert two.pulled > 100


async def test_completions_with_token_ids(deploy: Any) -> None:
    deployment = await deploy()
    headers = {"Authorization": "Bearer sk-canary-token-ids", "X-Session-ID": "ids"}
    prompt = [number % 200 for number in range(300)]
    one = await send(deployment, {"model": "tiny", "prompt": prompt}, headers)
    two = await send(deployment, {"model": "tiny", "prompt": [*prompt, *one.text.encode(), *prompt]}, headers)
    assert_right(deployment, two)
    assert two.pulled > 250


async def test_the_handle_travels_unchanged(deploy: Any) -> None:
    # The judge in the fake engine compares every key of every handle; see `deployment.EXTRAS`.
    deployment = await deploy()
    for stream in (False, True):
        talk = Talk(deployment, stream=stream)
        await talk.say()
        turn = await talk.say("More.")
        assert len(turn.attached) == 1
        sent = turn.prefills[0].params
        assert {key: sent[key] for key in EXTRAS} == EXTRAS
        assert sent["remote_blocks_expiry_time"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_another_tenant_with_the_same_id_and_text_gets_nothing(deploy: Any, stream: bool) -> None:
    deployment = await deploy()
    fields: dict[str, Any] = {"conversation_id": "shared", "stream": stream, "opening": f"Same words {stream}. "}
    mine = Talk(deployment, tenant=f"mine-{stream}", **fields)
    await mine.say()
    theirs = Talk(deployment, tenant=f"theirs-{stream}", **fields)
    theirs.messages = list(mine.messages)
    assert (await theirs.say("Go on.")).attached == []
    assert len((await mine.say("Go on.")).attached) == 1


@pytest.mark.parametrize(("flags", "attached"), [((), 0), ((("--anonymous", "reuse"),), 1)])
async def test_requests_without_a_principal(deploy: Any, flags: Any, attached: int) -> None:
    deployment = await deploy(Spec(flags=flags))
    talk = Talk(deployment, tenant=None, conversation_id="anonymous")
    await talk.say()
    assert len((await talk.say("Go on.")).attached) == attached


async def test_the_tenant_header_counts_only_when_trusted(deploy: Any) -> None:
    trusting = await deploy(Spec(flags=(("--tenant-from", "header"), ("--gateway-cidr", "127.0.0.0/8"))))
    first = Talk(trusting, tenant="one-key", headers={"X-PD-Tenant": "red"}, opening="Trusted. ")
    await first.say()
    other = Talk(trusting, tenant="one-key", headers={"X-PD-Tenant": "blue"})
    other.messages = list(first.messages)
    assert (await other.say("Go on.")).attached == []
    assert len((await first.say("Go on.")).attached) == 1

    plain = await deploy()
    first = Talk(plain, tenant=None, headers={"X-PD-Tenant": "red"}, opening="Untrusted. ")
    await first.say()
    assert (await first.say("Go on.")).attached == []


async def test_reuse_off(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--reuse", "off"),)))
    talk = Talk(deployment, conversation_id="off", stream=True)
    await talk.say()
    assert (await talk.say("Go on.")).attached == []
    assert deployment.decode.connector.retained() == {}


async def test_a_short_conversation_is_not_worth_a_handle(deploy: Any) -> None:
    deployment = await deploy(Spec(flags=(("--recompute-threshold", "100000"),)))
    talk = Talk(deployment)
    await talk.say()
    assert (await talk.say("Go on.")).attached == []


async def test_no_handle_from_decode_is_a_normal_outcome(deploy: Any) -> None:
    deployment = await deploy(Spec(mode="stock", connector=(("bidirectional", False),)))
    talk = Talk(deployment, stream=True)
    for _ in range(3):
        assert (await talk.say()).attached == []


async def test_conversations_do_not_mix(deploy: Any) -> None:
    deployment = await deploy()
    talks = [Talk(deployment, tenant="one tenant", stream=bool(number % 2)) for number in range(4)]
    for round_ in range(3):
        for talk in talks:
            turn = await talk.say()
            assert len(turn.attached) == (1 if round_ else 0)


async def test_two_pairs_the_holder_is_preferred(deploy: Any) -> None:
    deployment = await deploy(TWO_BY_TWO)
    talks = [Talk(deployment, stream=True) for _ in range(4)]
    homes: dict[int, str] = {}
    for round_ in range(3):
        for number, talk in enumerate(talks):
            await talk.say()
            home = next(engine.name for engine in deployment.decodes if engine.generates)
            assert homes.setdefault(number, home) == home
            if round_:
                assert sum(record.pulled_tokens or 0 for record in deployment.records(deployment.prefills)) > 100
            for engine in deployment.engines:
                engine.requests.clear()
