"""The count of reused prompt tokens that a client sees is P's own, in every API, streamed or not (BM-01).

With and without an engine that tells D of it: vLLM does from 0.32 on, and before that D counts the whole prompt.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.chat import TEXT, Turn, send
from support.deployment import Deployment, Spec

OLD = Spec(connector=(("tells_cached", False),), engine=(("version", "0.29.0"),))
NEW = Spec()
BLIND = Spec(connector=(("tells_cached", False),), engine=(("version", "0.29.0"), ("details", False)))

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def body_of(api: str, text: str, stream: bool, before: list[Any]) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if stream and api in ("chat", "completions") else {}
    common = {"model": "tiny", "stream": stream, "conversation_id": f"usage-{text[:30]}", **options}
    messages = [*before, {"role": "user", "content": text}]
    match api:
        case "completions":
            return {**common, "prompt": "".join(str(message["content"]) for message in messages)}
        case "responses":
            return {**common, "input": messages}
        case "messages":
            return {**common, "messages": messages, "max_tokens": 99}
    return {**common, "messages": messages}


def usage_of(api: str, turn: Turn) -> dict[str, Any]:
    """The usage that a client ends up with."""
    if not turn.body.get("stream"):
        found: dict[str, Any] = turn.json["usage"]
        return found
    if api == "responses":
        return dict(turn.events[-1]["response"]["usage"])
    (usage,) = (event["usage"] for event in turn.events[1:] if event != "[DONE]" and event.get("usage"))
    return dict(usage)


def cached_of(api: str, usage: dict[str, Any]) -> tuple[Any, int]:
    """The cached tokens, and all of the prompt's."""
    if api == "responses":
        details = usage["input_tokens_details"]
        assert details["cached_tokens_per_turn"] == [details["cached_tokens"]]
        return details["cached_tokens"], usage["input_tokens"]
    if api == "messages":
        cached = usage.get("cache_read_input_tokens")
        return cached, usage["input_tokens"] + (cached or 0)
    details = usage["prompt_tokens_details"]
    return (details["cached_tokens"] if details is not None else None), usage["prompt_tokens"]


def text_of(api: str, turn: Turn) -> str:
    if api == "chat":
        return turn.text
    if turn.body.get("stream"):
        pieces = [event for event in turn.events if event != "[DONE]"]
        if api == "completions":
            return "".join(event["choices"][0]["text"] for event in pieces if event["choices"])
        if api == "responses":
            return "".join(event["delta"] for event in pieces if event["type"] == "response.output_text.delta")
        return "".join(event["delta"].get("text", "") for event in pieces if event["type"] == "content_block_delta")
    if api == "completions":
        return str(turn.json["choices"][0]["text"])
    content = turn.json["output"][0]["content"] if api == "responses" else turn.json["content"]
    return str(content[0]["text"])


async def two_turns(deployment: Deployment, api: str, stream: bool, spec: str) -> list[Turn]:
    turns: list[Turn] = []
    before: list[Any] = []
    for text in (f"{api} {stream} {spec}. {TEXT}", "And then?"):
        body = body_of(api, text, stream, before)
        body["conversation_id"] = f"usage-{api}-{stream}-{spec}"
        headers = {"Authorization": f"Bearer sk-usage-{api}-{stream}-{spec}"}
        turn = await send(deployment, body, headers, path=PATHS[api])
        assert turn.status == 200, turn.raw
        turns.append(turn)
        before += [{"role": "user", "content": text}, {"role": "assistant", "content": text_of(api, turn)}]
    return turns


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("spec", [OLD, NEW], ids=["old", "new"])
async def test_the_count_is_that_of_prefill(deploy: Any, spec: Spec, api: str, stream: bool) -> None:
    deployment = await deploy(spec)
    turns = await two_turns(deployment, api, stream, str(spec is OLD))
    assert turns[1].pulled > 100
    for turn in turns:
        (prefill,) = turn.prefills
        (decode,) = turn.decodes
        cached, prompt = cached_of(api, usage_of(api, turn))
        assert cached == (prefill.local_tokens or 0) + (prefill.pulled_tokens or 0)
        assert prompt == prefill.prompt_tokens == decode.prompt_tokens
        assert decode.pulled_tokens  # what D would have told


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", ["chat", "completions", "messages"])
async def test_a_count_that_engines_do_not_give_is_not_made_up(deploy: Any, api: str, stream: bool) -> None:
    deployment = await deploy(BLIND)
    for turn in await two_turns(deployment, api, stream, "blind"):
        cached, prompt = cached_of(api, usage_of(api, turn))
        assert cached is None
        assert prompt == turn.decodes[0].prompt_tokens


async def test_without_include_usage_there_is_none(deploy: Any) -> None:
    deployment = await deploy(OLD)
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": TEXT}]}
    turn = await send(deployment, body, {"Authorization": "Bearer sk-usage-none"})
    assert all("usage" not in event for event in turn.events if event != "[DONE]")


@pytest.mark.parametrize("spec", [OLD, NEW], ids=["old", "new"])
async def test_running_usage(deploy: Any, spec: Spec) -> None:
    deployment = await deploy(spec)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "stream": True, "stream_options": options}
    body["messages"] = [{"role": "user", "content": f"Running {spec is OLD}. {TEXT}"}]
    turn = await send(deployment, body, {"Authorization": "Bearer sk-usage-running"})
    counts = {event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in turn.events if event != "[DONE]"}
    assert counts == {turn.prefills[0].local_tokens}


async def test_decode_alone_tells_its_own(deploy: Any) -> None:
    deployment = await deploy(OLD)
    body = {"model": "tiny", "n": 2, "messages": [{"role": "user", "content": "Alone. " + TEXT}]}
    for count in (0, 1):
        turn = await send(deployment, body, {"Authorization": "Bearer sk-usage-alone"})
        cached = turn.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 100) is bool(count)
        assert cached == turn.decodes[0].local_tokens
