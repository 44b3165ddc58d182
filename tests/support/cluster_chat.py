"""Turns of one conversation with the official OpenAI client, run in a cluster's network; one line of JSON per turn.

``python -m support.cluster_chat --url URL --turns N --words FILE``: FILE holds the model's words, so that texts of a
known length can be made. A process of its own, because only it is in that network.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import openai


def main() -> None:
    """Talk, streamed on every second turn."""
    parser = argparse.ArgumentParser(prog="chat")
    parser.add_argument("--url", required=True)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--words", type=Path, required=True)
    arguments = parser.parse_args()
    words: list[str] = json.loads(arguments.words.read_text())
    random_of_this_talk = random.Random(11)
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="key-of-one-user", max_retries=0, timeout=300)
    messages: list[Any] = []
    for number in range(arguments.turns):
        text = "".join(random_of_this_talk.choices(words, k=600 if number == 0 else 60))
        messages.append({"role": "user", "content": text.strip()})
        request: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0}
        if number % 2 == 0:
            reply = ""
            for event in client.chat.completions.create(stream=True, **request):
                reply += (event.choices[0].delta.content or "") if event.choices else ""
        else:
            reply = client.chat.completions.create(**request).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        print(json.dumps({"turn": number + 1, "reply": reply}), flush=True)


if __name__ == "__main__":
    main()
