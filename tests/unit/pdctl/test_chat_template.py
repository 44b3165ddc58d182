"""The chat template: ordinary turns extend each other, reasoning breaks that, tools are rendered."""

import json

import jinja2
import pytest

from pdctl.core.chat_template import CHAT_TEMPLATE

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


def rendered(messages, generate=True, **arguments) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    # As the engines' tokenizer library does it.
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=generate, **arguments)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_a_plain_conversation_reads_as_written():
    text = rendered([{"role": "system", "content": "Be brief."}, user("hi"), assistant(" a b"), user("more")])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n a b<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_the_next_turn_extends_prompt_and_reply(tools):
    first = [user("hi")]
    second = [*first, assistant(" some words"), user("again")]
    third = [*second, assistant(" others"), user("and again")]
    assert rendered(second, tools=tools).startswith(rendered(first, tools=tools) + " some words<|im_end|>")
    assert rendered(third, tools=tools).startswith(rendered(second, tools=tools) + " others<|im_end|>")


def test_thinking_opens_in_the_prompt_and_is_gone_in_the_next_turn():
    first = rendered([user("hi")], enable_thinking=True)
    assert first.endswith("<|im_start|>assistant\n<think>\n")
    second = rendered([user("hi"), assistant(" words"), user("again")], enable_thinking=True)
    assert not second.startswith(first)


@pytest.mark.parametrize(
    "reply",
    [
        assistant("<think>\nsecret</think>\nanswer"),
        assistant("secret</think>\nanswer"),
        assistant("answer", reasoning="secret"),
        assistant("answer", reasoning_content="secret"),
    ],
)
def test_earlier_reasoning_is_left_out(reply):
    text = rendered([user("hi"), reply, user("again")])
    assert "secret" not in text
    assert "<|im_start|>assistant\nanswer<|im_end|>" in text


def test_reasoning_after_the_last_question_stays():
    messages = [user("hi"), assistant(None, reasoning="because", tool_calls=[CALL]), {"role": "tool", "content": "sun"}]
    assert "<think>\nbecause</think>\n<tool_call>" in rendered(messages)


def test_tools_calls_and_results_are_rendered():
    messages = [user("hi"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "sun"}]
    text = rendered(messages, tools=[TOOL])
    assert text.startswith("<|im_start|>system\nFunctions")
    assert json.dumps(TOOL) in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n<tool_response>\nsun\n</tool_response><|im_end|>" in text
    as_text = {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert rendered([user("hi"), assistant(None, tool_calls=[as_text])], tools=[TOOL]) in text.replace(
        "<|im_start|>tool\n<tool_response>\nsun\n</tool_response><|im_end|>\n", ""
    )


def test_other_tools_change_the_prompt_from_its_start():
    other = {"type": "function", "function": {"name": "clock", "parameters": {}}}
    assert rendered([user("hi")], tools=[TOOL])[:200] != rendered([user("hi")], tools=[other])[:200]


def test_no_generation_prompt_unless_asked_for():
    assert rendered([user("hi")], generate=False) == "<|im_start|>user\nhi<|im_end|>\n"
