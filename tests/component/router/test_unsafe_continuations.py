"""A next prompt that does not continue what the holder computed: the answer must be the recomputed one, in both modes.

With a proof the router may attach and the engine cuts; with the stock connector the router alone must not attach. The
assertion that counts is the answer: a wrong KV block makes a wrong hash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chat import TEXT, Talk
from support.deployment import Deployment, Spec
from support.fake_engine import AnswerStyle, Behaviour, Template

TRAPS = Template(strips_reasoning=True, reserialises_tools=True)
MODES = ["verified", "stock"]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_weather", "get_tide")
]


def edit_first(talk: Talk) -> None:
    talk.messages[0]["content"] = "Edited. " + talk.messages[0]["content"]


def edit_answer(talk: Talk) -> None:
    talk.messages[1]["content"] = "I never said anything of the kind, and " + TEXT


def regenerate(talk: Talk) -> None:
    del talk.messages[-1]


def shorten(talk: Talk) -> None:
    del talk.messages[1:]
    talk.messages[0]["content"] = talk.messages[0]["content"][:90]


def drop_first_exchange(talk: Talk) -> None:
    del talk.messages[:2]


def compact(talk: Talk) -> None:
    talk.messages[:2] = [{"role": "system", "content": "Summary: they talked about a harbour. " + TEXT}]


def add_system(talk: Talk) -> None:
    talk.messages.insert(0, {"role": "system", "content": "Be brief."})


def swap_roles(talk: Talk) -> None:
    talk.messages[0]["role"] = "system"


EDITS: list[Callable[[Talk], None]] = [
    edit_first,
    edit_answer,
    regenerate,
    shorten,
    drop_first_exchange,
    compact,
    add_system,
    swap_roles,
]


@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("mode", MODES)
async def test_edited_history(deploy: Any, mode: Any, edit: Any, by_id: bool) -> None:
    deployment = await deploy(Spec(mode=mode))
    name = f"{mode}-{edit.__name__}-{by_id}"
    ids: dict[str, Any] = {"conversation_id": name} if by_id else {}
    talk = Talk(deployment, stream=True, **ids)
    await talk.say()
    await talk.say("And then?")
    edit(talk)
    text = None if edit is regenerate else "Go on."
    turn = await talk.say(text, seed=1)
    _only_with_a_proof(deployment, turn.attached)
    await talk.say("And after that?")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"tools": TOOLS}, id="tools added"),
        pytest.param({"tool_choice": "none", "tools": TOOLS}, id="tools offered but forbidden"),
        pytest.param({"chat_template_kwargs": {"thinking": True}}, id="template argument"),
        pytest.param({"reasoning_effort": "high"}, id="reasoning effort"),
        pytest.param({"documents": [{"title": "t", "text": "d"}]}, id="documents"),
        pytest.param({"truncate_prompt_tokens": 100}, id="truncated"),
        pytest.param({"cache_salt": "pepper"}, id="cache salt"),
        pytest.param({"chat_template": "{{ messages }}"}, id="template"),
    ],
)
@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_scope_changed(deploy: Any, mode: Any, by_id: bool, fields: dict[str, Any]) -> None:
    deployment = await deploy(Spec(mode=mode))
    ids: dict[str, Any] = {"conversation_id": f"{mode}-{fields}"} if by_id else {}
    talk = Talk(deployment, **ids)
    await talk.say()
    turn = await talk.say("Go on.", **fields)
    _only_with_a_proof(deployment, turn.attached)


@pytest.mark.parametrize("mode", MODES)
async def test_tools_removed_or_reordered(deploy: Any, mode: Any) -> None:
    deployment = await deploy(Spec(mode=mode))
    for change in ({"tools": TOOLS[::-1]}, {"tools": TOOLS[:1]}, {"tools": None}):
        talk = Talk(deployment, tools=TOOLS, conversation_id=f"{mode}-{change}")
        await talk.say()
        turn = await talk.say("Go on.", **change)
        _only_with_a_proof(deployment, turn.attached)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reasoning", ["field", "inline"])
@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize("mode", MODES)
async def test_reasoning_between_turns(deploy: Any, mode: Any, strips: bool, reasoning: Any, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode, template=TRAPS if strips else Template()))
    style = AnswerStyle(reasoning=reasoning)
    for engine in deployment.decodes:
        engine.default = Behaviour(style=style)
    talk = Talk(deployment, stream=stream, style=style)
    await talk.say()
    for drop in (False, True):
        if drop:
            talk.messages[-1].pop("reasoning", None)
        turn = await talk.say("And then? Tell me in more words than before, please.")
        _only_with_a_proof(deployment, turn.attached)
        if mode == "verified":
            assert turn.pulled > 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reserialises", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_tool_calls(deploy: Any, mode: Any, reserialises: bool, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode, template=TRAPS if reserialises else Template()))
    style = AnswerStyle(calls_tool=True)
    deployment.decode.default = Behaviour(style=style)
    talk = Talk(deployment, stream=stream, style=style, tools=TOOLS)
    turn = await talk.say()
    call = turn.message["tool_calls"][0]
    talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "rain, 12 degrees"})
    turn = await talk.say(None)
    _only_with_a_proof(deployment, turn.attached)
    if mode == "verified":
        assert turn.pulled > 100
    deployment.decode.default = Behaviour()
    talk.style = None
    turn = await talk.say("Thanks. Now without any tool.", tools=None)
    _only_with_a_proof(deployment, turn.attached)


async def test_generated_ids_that_the_tokenizer_would_not_make(deploy: Any) -> None:
    deployment = await deploy()
    style = AnswerStyle(unusual_ids=True)
    deployment.decode.default = Behaviour(style=style)
    talk = Talk(deployment, style=style)
    await talk.say()
    turn = await talk.say("And then?")
    assert turn.pulled > 100


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_cut_by_the_token_limit(deploy: Any, mode: Any, stream: bool) -> None:
    deployment = await deploy(Spec(mode=mode))
    talk = Talk(deployment, stream=stream)
    await talk.say(max_tokens=21)
    turn = await talk.say("Go on.", max_completion_tokens=30)
    assert len(turn.attached) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_media(deploy: Any, mode: Any) -> None:
    deployment = await deploy(Spec(mode=mode))
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    talk = Talk(deployment, conversation_id=f"media-{mode}")
    talk.messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, picture]}]
    await talk.say()
    assert (await talk.say("Go on.")).attached == []


@pytest.mark.parametrize("mode", MODES)
async def test_text_in_parts_is_the_same_text(deploy: Any, mode: Any) -> None:
    deployment = await deploy(Spec(mode=mode))
    talk = Talk(deployment)
    await talk.say()
    talk.messages[-1]["content"] = [{"type": "text", "text": talk.messages[-1]["content"]}]
    turn = await talk.say("Go on.")
    _only_with_a_proof(deployment, turn.attached)


def _only_with_a_proof(deployment: Deployment, attached: list[str]) -> None:
    if deployment.spec.mode == "stock":
        assert attached == []
