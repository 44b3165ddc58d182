"""Is a router doing its work? Asked once with a real client before the measurement, and of every measured run after it.

A router that drops the stream, skips the prefill or forgets the handles would look cheap, so a figure without these
checks means nothing.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import Any, Final

import openai

from perf.contenders import Contender, Place
from perf.errors import PerfError
from perf.load import Outcome, Shape
from perf.processes import Program

_START_LIMIT_S: Final = 90.0
_MODEL: Final = "m"
_HANDLE_MARK: Final = b"remote_block_ids"


def set_up_engines(place: Place, gap_ms: float) -> None:
    """Set the time between tokens and reset the counters."""
    _call(place.prefill, "POST", "/setup", {"gap_ms": gap_ms})


def read_counters(place: Place) -> dict[str, int]:
    """The canned engines' counters; see ``canned_engine.Counters``."""
    counters: dict[str, int] = json.loads(_call(place.prefill, "GET", "/counters"))
    return counters


def wait_until_serving(contender: Contender, place: Place, program: Program) -> None:
    """Wait for the first complete answer.

    Raises:
        PerfError: when the program ends or gives no answer in time.
    """
    deadline = time.monotonic() + _START_LIMIT_S
    last: Exception | None = None
    while time.monotonic() < deadline:
        program.assert_running()
        try:
            _stream_raw(place, "warm-up", tokens=1)
            return
        except (OSError, http.client.HTTPException, PerfError) as error:
            last = error
            time.sleep(0.3)
    raise PerfError(f"{contender.title} did not serve within {_START_LIMIT_S:.0f} s; last: {last}; see {program.log}")


def verify(contender: Contender, place: Place, shape: Shape) -> int:
    """Play two turns of a conversation with the official client and look at both ends.

    Returns:
        Length in bytes of a streamed answer's body, as the client gets it: the least that a measured turn may receive.

    Raises:
        PerfError: naming what is wrong.
    """
    for gap_ms in (1.0, 0.0):
        set_up_engines(place, gap_ms)
        conversation = f"verify-{gap_ms}"
        with openai.OpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            for turn in (1, 2):
                _verify_turn(contender, client, conversation, turn, shape)
        counters = read_counters(place)
        expected = {"prefills": 2, "decodes": 2, "handed_over": 2, "finished": 2, "attached": int(contender.reuses)}
        wrong = {name: counters[name] for name, count in expected.items() if counters[name] != count}
        if wrong:
            raise PerfError(f"{contender.title}: after two turns the engines counted {wrong} instead of {expected}")
    body = _stream_raw(place, "verify-raw", shape.tokens)
    if contender.hides_handles and _HANDLE_MARK in body:
        raise PerfError(f"{contender.title} lets the handle through to the client")
    return len(body)


def _verify_turn(contender: Contender, client: openai.OpenAI, conversation: str, turn: int, shape: Shape) -> None:
    stream = client.chat.completions.create(
        model=_MODEL,
        stream=True,
        max_tokens=shape.tokens,
        messages=[{"role": "user", "content": "word " * shape.words}],
        extra_body={"conversation_id": conversation},
    )
    text, finish = "", None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    if text != " token" * shape.tokens or finish != "stop":
        raise PerfError(f"{contender.title}: turn {turn} came as {len(text)} characters, finish reason {finish}")


def verify_run(
    contender: Contender, shape: Shape, outcome: Outcome, counters: dict[str, int], answer_bytes: int
) -> list[str]:
    """What is wrong with a measured run, as sentences; an empty list when its figure may be used."""
    faults = [f"{count} {name}" for name, count in outcome.faults.items()]
    turns, open_turns = outcome.turns, 2 * shape.connections
    if turns == 0:
        return ["no turn was finished"]
    if outcome.received_bytes < turns * answer_bytes:
        faults.append(f"{outcome.received_bytes / turns:.0f} bytes per turn came, a whole answer has {answer_bytes}")
    for name in ("prefills", "decodes", "handed_over"):
        if not turns <= counters[name] <= turns + open_turns:
            faults.append(f"{turns} turns made {counters[name]} {name}")
    if counters["finished"] < turns:
        faults.append(f"{turns} turns, but the decode engine finished {counters['finished']}")
    if contender.reuses:
        # The turns that the previous run broke off have no handle, nor has a conversation that is then asked again.
        if counters["attached"] < turns - 2 * open_turns:
            faults.append(f"only {counters['attached']} of {turns} prefills carried a handle")
        if counters["repeated"]:
            faults.append(f"{counters['repeated']} handles were sent twice")
    return faults


def _stream_raw(place: Place, conversation: str, tokens: int) -> bytes:
    body = {
        "model": _MODEL,
        "stream": True,
        "max_tokens": tokens,
        "conversation_id": conversation,
        "messages": [{"role": "user", "content": "hello"}],
    }
    return _call(place.listen, "POST", "/v1/chat/completions", body)


def _call(port: int, method: str, path: str, body: Any = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, body=data, headers={"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise PerfError(f"{method} {path} on port {port} answered {response.status}: {answer[:300]!r}")
    return answer
