"""A conversation with the official OpenAI client, from inside the cluster's network; one line of JSON per turn.

``python -m support.cluster_serving_client --url URL --turns N --model NAME``. Separate process, because only it is in
that network.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

import openai

from support.fake_engine import Template

TEXT: Final = "Please describe the harbour in the morning, the boats, the gulls, and what the old pilot said. " * 2


def main() -> None:
    """Talk, streamed on every second turn."""
    parser = argparse.ArgumentParser(prog="client")
    parser.add_argument("--url", required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="key-of-one-user", max_retries=0, timeout=120)
    messages: list[dict[str, Any]] = []
    before = 0
    for number in range(arguments.turns):
        messages.append({"role": "user", "content": f"Turn {number}. {TEXT}"})
        text, finish = _turn(client, arguments.model, messages, stream=number % 2 == 0)
        print(json.dumps({"messages": messages, "text": text, "finish_reason": finish, "before": before}), flush=True)
        messages.append({"role": "assistant", "content": text})
        before = len(Template().render({"messages": messages}))


def _turn(client: openai.OpenAI, model: str, messages: list[Any], *, stream: bool) -> tuple[str, str | None]:
    if not stream:
        whole = client.chat.completions.create(model=model, messages=messages)
        return whole.choices[0].message.content or "", whole.choices[0].finish_reason
    text, finish = "", None
    for event in client.chat.completions.create(model=model, messages=messages, stream=True):
        text += event.choices[0].delta.content or ""
        finish = event.choices[0].finish_reason or finish
    return text, finish


if __name__ == "__main__":
    main()
