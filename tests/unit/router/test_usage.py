"""P's count of reused tokens in the place of D's: in each API's usage, in nothing else, byte for byte around it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.fields import Api
from pd_router.core.sse import SseFilter
from pd_router.core.usage import corrector, reused_tokens

OPENAI = (
    '{"prompt_tokens":100,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":99,"multimodal_tokens":7}}'
)
RESPONSES = (
    '{"input_tokens":100,"input_tokens_details":{"cached_tokens":99,"cache_write_tokens":0,"cached_tokens_per_turn":[99]},'
    '"output_tokens":3}'
)
MESSAGES = '{"input_tokens":1,"output_tokens":3,"cache_read_input_tokens":99}'

ROWS: list[tuple[Api, str, int | None, str]] = [
    (Api.CHAT, OPENAI, 40, OPENAI.replace("99", "40")),
    (Api.COMPLETIONS, OPENAI, 0, OPENAI.replace("99", "0")),
    (Api.CHAT, OPENAI, 99, OPENAI),
    (Api.CHAT, OPENAI, 500, OPENAI.replace("99", "100")),
    (Api.CHAT, OPENAI, None, OPENAI.replace("99", "null")),
    (Api.RESPONSES, RESPONSES, 40, RESPONSES.replace("99", "40")),
    (Api.RESPONSES, RESPONSES, None, RESPONSES.replace("99", "0")),
    (Api.MESSAGES, MESSAGES, 40, '{"input_tokens":60,"output_tokens":3,"cache_read_input_tokens":40}'),
    (Api.MESSAGES, MESSAGES, None, '{"input_tokens":100,"output_tokens":3,"cache_read_input_tokens":null}'),
    (Api.MESSAGES, MESSAGES, 99, MESSAGES),
]


@pytest.mark.parametrize(("api", "usage", "reused", "right"), ROWS)
@pytest.mark.parametrize("around", ['{"id":"x","usage":%s}', 'data: {"usage" : %s, "z":1}\n\n', '{"a":{"usage":%s}}'])
def test_the_count_is_put_right_and_nothing_else_changes(
    api: Api, usage: str, reused: int | None, right: str, around: str
) -> None:
    assert corrector(api, reused)((around % usage).encode()) == (around % right).encode()


UNTOUCHED: list[str] = [
    '{"usage":null}',
    '{"usage":{"prompt_tokens":100}}',
    '{"usage":{"prompt_tokens":100,"prompt_tokens_details":null}}',
    '{"usage":{"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":null}}}',
    '{"usage":{"prompt_tokens":"x","prompt_tokens_details":{"cached_tokens":5}}}',
    '{"usage":"text"}',
    '{"usage":{"broken":',
    '{"content":"they said \\"usage\\":{\\"prompt_tokens\\":1,\\"prompt_tokens_details\\":{\\"cached_tokens\\":9}}"}',
    '{"tools":[{"parameters":{"properties":{"usage":{"type":"object","cached_tokens":9}}}}]}',
    'data: {"a":"usage"}\n\n',
]


@pytest.mark.parametrize("text", UNTOUCHED)
@pytest.mark.parametrize("api", Api)
def test_what_is_no_count_is_left_alone(api: Api, text: str) -> None:
    assert corrector(api, 3)(text.encode()) == text.encode()


@given(st.text(max_size=40), st.integers(0, 200))
def test_other_letters_survive(text: str, reused: int) -> None:
    whole: dict[str, Any] = {"content": text, "usage": json.loads(OPENAI)}
    shown = json.loads(corrector(Api.CHAT, reused)(json.dumps(whole, ensure_ascii=False).encode()))
    whole["usage"]["prompt_tokens_details"]["cached_tokens"] = min(reused, 100)
    assert shown == whole


@pytest.mark.parametrize(
    ("cached", "local", "pulled", "right"),
    [(5, None, None, 5), (0, 3, 4, 0), (None, 3, 4, 7), (None, None, None, None), (None, None, 4, None)],
)
def test_what_prefill_said(cached: int | None, local: int | None, pulled: int | None, right: int | None) -> None:
    assert reused_tokens(cached, local, pulled) == right


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def test_the_short_cut_leaves_usage_to_the_long_way() -> None:
    token = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    counted = f'data: {{"choices":[],"usage":{OPENAI}}}\n\n'.encode()
    sent: list[bytes] = []
    plain, correcting = SseFilter(), SseFilter(correct=corrector(Api.CHAT, 40))
    assert plain.passer(sent.append)(chunk(counted))
    passed = correcting.passer(sent.append)
    assert passed(chunk(token))
    assert not passed(chunk(counted))
    assert correcting.feed(counted) == counted.replace(b"99", b"40")
    assert correcting.usage is not None
    assert correcting.usage["prompt_tokens_details"]["cached_tokens"] == 40


def test_a_usage_in_two_reads_is_put_right() -> None:
    counted = f'data: {{"choices":[],"usage":{OPENAI}}}\n\n'.encode()
    for at in range(1, len(counted)):
        stream = SseFilter(correct=corrector(Api.CHAT, 40))
        assert stream.feed(counted[:at]) + stream.feed(counted[at:]) == counted.replace(b"99", b"40")
