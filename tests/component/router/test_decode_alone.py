"""Turns that one engine must serve alone (HL-19), in the two APIs that have them: no prefill, no params, nothing kept.

For the Responses API see its own tests; the Messages API has no such option.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.chat import TEXT, send

CHAT: list[dict[str, Any]] = [{"n": 2}, {"use_beam_search": True}, {"best_of": 2}, {"prompt_logprobs": 1}]
COMPLETIONS: list[dict[str, Any]] = [
    *CHAT,
    {"echo": True},
    {"prompt": [TEXT, "two " * 40]},
    {"prompt": [[65] * 100, [66] * 90]},
]
ROWS = [("/v1/chat/completions", row) for row in CHAT] + [("/v1/completions", row) for row in COMPLETIONS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), ROWS, ids=repr)
async def test_alone(deploy: Any, path: str, fields: dict[str, Any], stream: bool) -> None:
    deployment = await deploy()
    prompt: dict[str, Any] = {"prompt": TEXT}
    if path.startswith("/v1/chat"):
        prompt = {"messages": [{"role": "user", "content": TEXT}]}
    body = {"model": "tiny", "stream": stream, "session_id": "alone", **prompt, **fields}
    for _ in range(2):
        turn = await send(deployment, body, {"Authorization": f"Bearer sk-alone-{path}-{fields}"}, path=path)
        assert turn.status == 200, turn.raw
        assert turn.prefills == []
        (decode,) = turn.decodes
        assert "kv_transfer_params" not in decode.body
        assert decode.request_id not in deployment.decode.connector.retained()
    assert (await deployment.explain())[-1]["link_fault"]
