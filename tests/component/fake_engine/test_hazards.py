"""The dangers of a wrong handle must show as a wrong answer from a stock pair, and be harmless with our connector.

If these pass for the wrong reason, every router test below them proves nothing. Aspects: other conversation, spent
handle after churn, shorter prompt, edited history, reasoning stripped, tool call in another spacing, unusual ids,
expiry, restart, retention.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_engine import AnswerStyle, Behaviour, FakeEngine, Template, expected_answer
from support.legs import hand_turn, post

MODES = ["stock", "verified"]
LONG = "The quick brown fox jumps over the lazy dog while the band plays on and on. " * 3
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A chat body whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    return {
        "model": "tiny",
        "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)],
        **more,
    }


def right(engine: FakeEngine, body: dict[str, Any], style: AnswerStyle | None = None) -> str:
    """The answer that recomputing gives."""
    return expected_answer(engine.config.template.render(body), model="tiny", style=style, body=body).content


@pytest.mark.parametrize("mode", MODES)
async def test_a_continued_conversation_is_pulled_and_right(make_pair: Any, mode: str) -> None:
    pair = await make_pair(mode)
    one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
    body = chat(LONG, one.text or "", "and then?")
    two = await hand_turn(pair.prefill, pair.decode, body, one.handle)
    assert two.text == right(pair.decode, body)
    assert (pair.prefill.generates[-1].pulled_tokens or 0) > 200
    assert (pair.decode.generates[-1].local_tokens or 0) > 200
    assert set(pair.decode.connector.retained()) == {two.handle["remote_request_id"]} if two.handle else False


async def test_another_conversations_handle(make_pair: Any) -> None:
    stock, verified = await make_pair("stock"), await make_pair("verified")
    for pair, wrong in ((stock, True), (verified, False)):
        other = await hand_turn(pair.prefill, pair.decode, chat("Tell me a secret. " + LONG))
        body = chat("What is the weather? " + LONG, "fine", "sure?")
        turn = await hand_turn(pair.prefill, pair.decode, body, other.handle)
        assert (turn.text != right(pair.decode, body)) is wrong
    assert verified.prefill.generates[-1].pulled_tokens == 0


@pytest.mark.parametrize("mode", MODES)
async def test_a_spent_handle_after_churn(make_pair: Any, mode: str) -> None:
    # The proof vouches for tokens, not for life (E11): only our connector's own memory of what it has used helps here.
    pair = await make_pair(mode, blocks=100, prefix_caching=False, decoder_ttl=1e9)
    one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
    body = chat(LONG, one.text or "", "and then?")
    first = await hand_turn(pair.prefill, pair.decode, body, one.handle, retain=mode == "stock")
    assert first.text == right(pair.decode, body)
    for number in range(8):
        await post(pair.decode.url + "/v1/chat/completions", chat(f"{number} other words {LONG}"))
    again = await hand_turn(pair.prefill, pair.decode, body, one.handle)
    assert again.text is not None
    assert (again.text != right(pair.decode, body)) is (mode == "stock")
    violations = pair.fabric.take_violations()
    assert any("used twice" in violation for violation in violations)
    assert any("unknown request" in violation for violation in violations) is (mode == "stock")


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda text: chat(LONG[:150]), id="shorter prompt"),
        pytest.param(lambda text: chat("Edited. " + LONG, text, "and then?"), id="first message edited"),
        pytest.param(lambda text: chat(LONG, "another answer than it gave " * 4, "and then?"), id="answer edited"),
        pytest.param(lambda text: chat(LONG, text, "and then?", tools=TOOLS), id="tools added"),
        pytest.param(lambda text: chat(LONG, text, "and then?", truncate_prompt_tokens=180), id="truncated"),
        pytest.param(lambda text: chat(LONG, text, "go on", reasoning_effort="high"), id="template argument added"),
    ],
)
async def test_a_prompt_that_does_not_continue(make_pair: Any, edit: Any) -> None:
    stock, verified = await make_pair("stock"), await make_pair("verified")
    for pair, wrong in ((stock, True), (verified, False)):
        one = await hand_turn(pair.prefill, pair.decode, chat(LONG, words=40))
        body = edit(one.text)
        two = await hand_turn(pair.prefill, pair.decode, body, one.handle)
        assert two.text is not None
        assert (two.text != right(pair.decode, body)) is wrong


@pytest.mark.parametrize(
    ("style", "template"),
    [
        pytest.param(AnswerStyle(reasoning="field"), Template(strips_reasoning=True), id="reasoning parsed away"),
        pytest.param(AnswerStyle(reasoning="inline"), Template(strips_reasoning=True), id="inline reasoning stripped"),
        pytest.param(AnswerStyle(unusual_ids=True), Template(), id="text tokenises to other ids"),
    ],
)
async def test_generated_ids_that_do_not_come_back(make_pair: Any, style: AnswerStyle, template: Template) -> None:
    for mode, wrong in (("stock", True), ("verified", False)):
        pair = await make_pair(mode, template)
        pair.decode.default = Behaviour(style=style)
        one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
        body = chat(LONG, one.text or "", "and then? Tell me in many more words, please.")
        two = await hand_turn(pair.prefill, pair.decode, body, one.handle)
        assert (two.text != right(pair.decode, body, style)) is wrong
        if two.report is not None:
            assert two.report["verdict"] == "trimmed"
            assert (pair.prefill.generates[-1].pulled_tokens or 0) >= 200


@pytest.mark.parametrize("reserialised", [False, True])
@pytest.mark.parametrize("mode", MODES)
async def test_a_tool_call_comes_back(make_pair: Any, mode: str, reserialised: bool) -> None:
    pair = await make_pair(mode, Template(reserialises_tools=reserialised))
    pair.decode.default = Behaviour(style=AnswerStyle(calls_tool=True))
    body = chat(LONG, tools=TOOLS)
    one = await hand_turn(pair.prefill, pair.decode, body)
    _, direct = await post(pair.decode.url + "/v1/chat/completions", body)
    body["messages"] += [
        direct["choices"][0]["message"],
        {
            "role": "tool",
            "tool_call_id": "call_get_weather",
            "content": "rain, 12 degrees, and some wind from the west",
        },
    ]
    two = await hand_turn(pair.prefill, pair.decode, body, one.handle)
    assert (two.text != right(pair.decode, body)) is (mode == "stock" and reserialised)


async def test_an_expired_handle_is_declined(make_pair: Any) -> None:
    pair = await make_pair("stock", decoder_ttl=60.0)
    one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
    pair.clock.advance(56)
    two = await hand_turn(pair.prefill, pair.decode, chat(LONG, one.text or "", "?"), one.handle)
    assert two.prefill_status == 500
    assert pair.prefill.connector.counters["expired"] == 1
    pair.clock.advance(5)
    assert pair.decode.used_blocks == 0


async def test_a_handle_of_a_dead_or_restarted_holder_fails(make_pair: Any) -> None:
    pair = await make_pair()
    one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
    two = await hand_turn(pair.prefill, pair.decode, chat("Another " + LONG))
    await pair.decode.kill()
    turn = await hand_turn(pair.prefill, pair.decode, chat(LONG, one.text or "", "?"), one.handle)
    assert turn.prefill_status == 500
    await pair.decode.restart()
    turn = await hand_turn(pair.prefill, pair.decode, chat("Another " + LONG, two.text or "", "?"), two.handle)
    assert turn.prefill_status == 500
    body = chat(LONG, one.text or "", "?")
    assert (await hand_turn(pair.prefill, pair.decode, body)).text == right(pair.decode, body)


async def test_load_failure_policies(make_pair: Any) -> None:
    pair = await make_pair()
    one = await hand_turn(pair.prefill, pair.decode, chat(LONG))
    await pair.decode.restart()
    pair.prefill.next(Behaviour(load_failure="finish_error"))
    body = {**chat(LONG, one.text or "", "?"), "max_tokens": 1, "kv_transfer_params": one.handle}
    status, answer = await post(pair.prefill.url + "/v1/chat/completions", body)
    assert (status, answer["choices"][0]["finish_reason"], answer["kv_transfer_params"]) == (200, "error", None)


async def test_what_gives_no_handle(make_pair: Any) -> None:
    pair = await make_pair()
    _, plain = await post(pair.decode.url + "/v1/chat/completions", chat(LONG))
    assert plain["kv_transfer_params"] is None
    unwanted = await hand_turn(pair.prefill, pair.decode, chat(LONG), retain=False)
    assert unwanted.handle is None
    assert pair.decode.used_blocks == pair.prefill.used_blocks == 0
    one_way = await make_pair("stock", bidirectional=False)
    assert (await hand_turn(one_way.prefill, one_way.decode, chat(LONG))).handle is None


async def test_below_the_threshold_the_handle_is_consumed_without_a_pull(make_pair: Any) -> None:
    pair = await make_pair()
    one = await hand_turn(pair.prefill, pair.decode, chat("Hi", max_tokens=20))
    body = chat("Hi", one.text or "", LONG)
    two = await hand_turn(pair.prefill, pair.decode, body, one.handle)
    assert two.text == right(pair.decode, body)
    assert pair.prefill.generates[-1].pulled_tokens == 0
    assert two.handle is not None
    assert set(pair.decode.connector.retained()) == {two.handle["remote_request_id"]}


async def test_params_with_both_flags_false_pin_a_stock_engine_for_ever(make_pair: Any) -> None:
    pair = await make_pair("stock")
    junk = {"do_remote_prefill": False, "do_remote_decode": False}
    await post(pair.decode.url + "/v1/chat/completions", {**chat(LONG), "kv_transfer_params": junk})
    pair.clock.advance(100_000)
    assert pair.decode.used_blocks > 0
    assert any("two flags" in violation for violation in pair.fabric.take_violations())
