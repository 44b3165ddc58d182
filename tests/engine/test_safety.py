"""Wrong, spent and stale handles on real engines: every answer equals recompute.

The list is one, played against two deployments. With our connector a handle may go out on an id alone, and the proof
decides how much of it is read; with vLLM's own nothing checks tokens, so the router must not attach at all. That the
comparison can fail is shown at the end: a wrong handle sent to a stock engine by hand gives another answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio

from support.engine_pair import TOLERANCE, Answer, Message, Pair, Pairs, distance, tiny_deployment, user

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPT_WORDS = 700
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a word up",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
        },
    }
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["Unpinned", "Pinned", "Stock"])
async def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Pair:
    """One pair per connector and retention; the whole list is played against each."""
    kind = request.param
    wanted = tiny_deployment("Stock") if kind == "Stock" else tiny_deployment(retention=kind)
    return await pairs.use(wanted, kind.lower())


@pytest.fixture
def retention(request: pytest.FixtureRequest) -> str:
    """`Unpinned`, `Pinned` or `Stock`: what the pair was started with."""
    value: str = request.node.callspec.params["pair"]
    return value


@pytest.fixture
def connector(retention: str) -> str:
    """`Verified` or `Stock`."""
    return "Stock" if retention == "Stock" else "Verified"


async def two_turns(pair: Pair, conversation: str) -> tuple[list[Message], Answer]:
    """A conversation after its first answer, with the next question asked."""
    messages = [user(pair.text(PROMPT_WORDS))]
    first = await pair.ask(messages, conversation=conversation)
    assert first.decision.get("stored") == "stored", first.decision
    return [*messages, first.message, user(pair.text(60))], first


async def test_a_true_continuation_equals_recompute(pair: Pair, connector: str) -> None:
    messages, _ = await two_turns(pair, "true")
    second = await pair.ask(messages, conversation="true")
    if connector == "Verified":
        assert second.pulled >= PROMPT_WORDS // 128 * 128
        assert second.decision["verdict"] == "proven"
    else:
        # The tiny model's words begin with a space, and white space at the edge of a reply may be tokenised otherwise
        # when it comes back: history alone does not prove such a turn.
        assert not second.attached
        assert second.decision["reason"] == "unproven"
    await pair.assert_equals_recompute(second, messages)


async def other_conversation(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    await two_turns(pair, "other")
    _, stranger = await two_turns(pair, "stranger")
    return [user(pair.text(PROMPT_WORDS)), stranger.message, user(pair.text(60))], {"conversation": "other"}


async def edited_history(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, _ = await two_turns(pair, "edited")
    words = messages[0]["content"].split(" ")
    words[200] = pair.text(1)
    return [user(" ".join(words)), *messages[1:]], {"conversation": "edited"}


async def regenerated(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, _ = await two_turns(pair, "again")
    return messages[:1], {"conversation": "again"}


async def shorter_prompt(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, _ = await two_turns(pair, "shorter")
    return [user(" ".join(messages[0]["content"].split(" ")[: PROMPT_WORDS // 2]))], {"conversation": "shorter"}


async def reasoning_stripped(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    # The template drops what stands before </think> in an earlier answer, so the prompt is not what D computed.
    messages = [user(pair.text(PROMPT_WORDS))]
    thinking = {"role": "assistant", "content": f"<think>{pair.text(150)}</think>"}
    first = await pair.ask([*messages, thinking, user(pair.text(20))], conversation="think")
    return [*messages, thinking, user(pair.text(21)), first.message, user(pair.text(60))], {"conversation": "think"}


async def reply_rewritten(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, first = await two_turns(pair, "rewritten")
    half = " ".join(str(first.message["content"]).split(" ")[20:])
    return [messages[0], {"role": "assistant", "content": half}, messages[2]], {"conversation": "rewritten"}


async def tools_changed(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, _ = await two_turns(pair, "tools")
    return messages, {"conversation": "tools", "tools": TOOLS, "tool_choice": "none"}


async def same_id_other_tenant(pair: Pair) -> tuple[list[Message], dict[str, Any]]:
    messages, _ = await two_turns(pair, "shared")
    return messages, {"conversation": "shared", "key": "tenant-b"}


Case = Callable[[Pair], Awaitable[tuple[list[Message], dict[str, Any]]]]
NEVER_ATTACHED = {tools_changed, same_id_other_tenant}
CASES: list[Case] = [
    other_conversation,
    edited_history,
    regenerated,
    shorter_prompt,
    reasoning_stripped,
    reply_rewritten,
    tools_changed,
    same_id_other_tenant,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_an_unsafe_continuation_equals_recompute(pair: Pair, connector: str, case: Case) -> None:
    messages, how = await case(pair)
    answer = await pair.ask(messages, **how)
    if connector == "Stock" or case in NEVER_ATTACHED:
        assert not answer.attached, answer.decision
    else:
        assert answer.attached, answer.decision
    shaping = {name: value for name, value in how.items() if name in ("tools", "tool_choice")}
    await pair.assert_equals_recompute(answer, messages, **shaping)


async def test_a_handle_is_sent_as_often_as_it_may_be(pair: Pair, retention: str) -> None:
    messages, _ = await two_turns(pair, "spent")
    both = await asyncio.gather(*(pair.ask(messages, conversation="spent") for _ in range(2)))
    assert [answer.attached for answer in both].count(True) == {"Unpinned": 2, "Pinned": 1, "Stock": 0}[retention]
    for number in range(6):
        await pair.ask([user(pair.text(PROMPT_WORDS))], conversation=f"churn-{number}")
    late = await pair.ask(messages, max_tokens=8)
    assert late.attached == (retention == "Unpinned"), late.decision
    await pair.assert_equals_recompute(late, messages)


async def by_hand(pair: Pair, prompt: list[int], handle: dict[str, Any] | None) -> tuple[float, dict[str, Any]]:
    """One turn straight to the engines: log-probability of P's first token, and D's handle."""
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    sent: dict[str, Any] = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    prefill, decode = pair.deployment.urls.prefill[0], pair.deployment.urls.decode[0]
    async with pair.session.post(
        f"{prefill}/v1/completions", json={**sent, "kv_transfer_params": handle or first}
    ) as response:
        answer = await response.json()
        assert response.status == 200, answer
    logprob = float(answer["choices"][0]["logprobs"]["token_logprobs"][0])
    sent["max_tokens"] = 8
    async with pair.session.post(
        f"{decode}/v1/completions", json={**sent, "kv_transfer_params": answer["kv_transfer_params"]}
    ) as response:
        assert response.status == 200
        after: dict[str, Any] = (await response.json())["kv_transfer_params"]
    return logprob, after


async def test_by_hand_a_wrong_handle_shows_with_stock_and_not_with_ours(pair: Pair, connector: str) -> None:
    """The positive control: without the router's care, vLLM's connector answers from another conversation's text."""
    mine = [1000 + 7 * place % 5000 for place in range(1000)]
    theirs = [1100 + 11 * place % 5000 for place in range(900)]
    truth, _ = await by_hand(pair, mine, None)
    again, _ = await by_hand(pair, mine, None)
    assert abs(truth - again) <= TOLERANCE
    _, handle = await by_hand(pair, theirs, None)
    wrong, _ = await by_hand(pair, mine, handle)
    if connector == "Stock":
        assert abs(wrong - truth) > 2 * TOLERANCE, "the comparison could not tell a wrong history from the right one"
    else:
        assert abs(wrong - truth) <= TOLERANCE


async def chat_by_hand(
    pair: Pair, messages: list[Message], handle: dict[str, Any] | None
) -> tuple[Answer, dict[str, Any]]:
    """One chat turn straight to the engines: decode's answer, and its handle."""
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    sent: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "logprobs": True}
    prefill, decode = pair.deployment.urls.prefill[0], pair.deployment.urls.decode[0]
    params = handle or first
    for url, tokens in ((prefill, 1), (decode, 40)):
        body = {**sent, "max_tokens": tokens, "kv_transfer_params": params}
        async with pair.session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        params = answer["kv_transfer_params"]
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    message = {"role": "assistant", "content": choice["message"]["content"]}
    return Answer(message, [one["logprob"] for one in content], [one["token"] for one in content], {}), params


async def test_the_comparison_sees_an_edited_history_that_was_answered_from_the_old_one(
    pair: Pair, connector: str
) -> None:
    """The control for all cases above, by the way that they take: wrong answer first, recompute afterwards."""
    text = pair.text(PROMPT_WORDS)
    answer, handle = await chat_by_hand(pair, [user(text)], None)
    edited = f"{pair.text(1)} {text.partition(' ')[2]}"
    messages = [user(edited), answer.message, user(pair.text(60))]
    suspect, _ = await chat_by_hand(pair, messages, handle)
    apart = distance(suspect, await pair.recompute(messages))
    if connector == "Stock":
        assert apart > 2 * TOLERANCE, "the comparison could not tell a wrong history from the right one"
    else:
        assert apart <= TOLERANCE


@pytest.mark.parametrize("pair", ["Pinned"], indirect=True)
async def test_by_hand_a_spent_handle_is_refused_by_our_connector(pair: Pair) -> None:
    """Nothing in vLLM's own connector could refuse it: there the router's single use alone protects."""
    prompt = [1200 + 13 * place % 5000 for place in range(900)]
    _, handle = await by_hand(pair, prompt, None)
    longer = [*prompt, *(2000 + place for place in range(100))]
    truth, _ = await by_hand(pair, longer, None)
    first, _ = await by_hand(pair, longer, handle)
    assert abs(first - truth) <= TOLERANCE
    for number in range(6):
        await by_hand(pair, [1300 + (17 + number) * place % 5000 for place in range(900)], None)
    second, _ = await by_hand(pair, longer, handle)
    assert abs(second - truth) <= TOLERANCE


async def test_distance_stops_where_the_answers_part() -> None:
    one = Answer({}, [-1.0, -2.0, -3.0], ["a", "b", "c"], {})
    other = Answer({}, [-1.01, -2.5, -9.0], ["a", "x", "c"], {})
    assert distance(one, other) == pytest.approx(0.5)
