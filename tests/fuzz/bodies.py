"""Target: a client's body, and the bodies of the two legs that are made of it.

What must hold for any bytes: only `ApiError` is raised, with a 4xx and a body in OpenAI's shape; both legs' bodies are
JSON; and nothing that a client said about KV is in them, at any depth and in any spelling.
"""

from __future__ import annotations

import json
import random
from typing import Any

import orjson

from fuzz.mutate import TOKENS, mutate
from pd_router.core.errors import ApiError
from pd_router.core.fields import Api
from pd_router.core.request import FIRST_PREFILL, prepare
from pd_wire.names import ID_FIELDS, KV_PARAMS

MARK = "CLIENTSWORD"
SPELLINGS = (KV_PARAMS, "kvTransferParams", "KV-Transfer-Params", "kv transfer params", "ec_transfer_params")
BODY_TOKENS = (
    *TOKENS,
    *(
        f'"{name}":'.encode()
        for name in (*SPELLINGS, *ID_FIELDS, "model", "messages", "stream", "n", "content", "input")
    ),
    *(
        b"true",
        b"false",
        b"{}",
        b"[]",
        b"1" + b"0" * 30,
        b"-1",
        b"0.1",
        b'"user"',
        b'"\\ud83d"',
        b"[" * 400,
        b'{"a":' * 400,
    ),
)
OURS = {"do_remote_prefill": True, "remote_engine_id": "ours", "remote_port": 1}


def talk(rng: random.Random) -> Any:
    return rng.choice(("hello", "", "x" * 500, "世界 🙂", '{"kv_transfer_params":1}', None, 5, ["a"], {"type": "text"}))


def poison(rng: random.Random) -> dict[str, Any]:
    return {rng.choice(SPELLINGS): rng.choice(({"remote_host": MARK}, MARK, [MARK], {"a": {"b": MARK}}))}


def somewhere(rng: random.Random, inner: Any) -> Any:
    for _ in range(rng.randrange(4)):
        inner = rng.choice(([inner], {"x": inner}, {"extra_body": inner}, {"vllm_xargs": inner}))
    return inner


def body(rng: random.Random) -> tuple[Api, Any]:
    api = rng.choice(list(Api))
    said: list[Any] = [
        {"role": rng.choice(("user", "assistant", "system", "tool", "x")), "content": talk(rng)}
        for _ in range(rng.randrange(4))
    ]
    made: dict[str, Any] = {"model": rng.choice(("tiny", "tiny", "other", 5, None))}
    match api:
        case Api.CHAT | Api.MESSAGES:
            made["messages"] = said
            made["max_tokens"] = 5
        case Api.COMPLETIONS:
            made["prompt"] = rng.choice(("text", ["a", "b"], [1, 2, 3], [[1], [2]], talk(rng)))
        case Api.RESPONSES:
            made["input"] = rng.choice(("text", said, talk(rng)))
    for name, value in (
        ("stream", rng.choice((True, False, None, 1))),
        ("n", rng.choice((1, 2, 0, "1", None))),
        (rng.choice(ID_FIELDS), rng.choice(("id", 5, None, {}))),
        ("tools", rng.choice(([], None, [{"type": "function", "function": {"name": "f"}}], 5))),
        ("tool_choice", rng.choice(("auto", "none", "required", {"type": "function"}))),
        ("x", somewhere(rng, poison(rng))),
        ("pd_proof", MARK),
        ("extra_body", poison(rng)),
        ("seed", rng.choice((2**70, -1, 1.5, 1e300))),
    ):
        if rng.random() < 0.3:
            made[name] = value
    if rng.random() < 0.4:
        made.update(poison(rng))
    if said and rng.random() < 0.3:
        rng.choice(said).update(poison(rng))
    return api, made


def one(rng: random.Random) -> None:
    """Make one input and judge it. Raises AssertionError, or whatever the router raises."""
    api, made = body(rng)
    raw = json.dumps(made, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.6:
        raw = mutate(rng, raw, BODY_TOKENS)
    try:
        prepared = prepare(api, raw, {"x-session-id": "a"}, frozenset({"tiny"}))
        legs = [prepared.prefill_body(None), prepared.prefill_body(OURS), prepared.decode_body(OURS)]
        alone = prepared.decode_body(None)
    except ApiError as error:
        judge_refusal(error)
        return
    judge(json.loads(legs[0]), dict(FIRST_PREFILL))
    for leg in legs[1:]:
        judge(json.loads(leg), OURS)
    judge(json.loads(alone), None)
    assert orjson.loads(legs[0])["stream"] is False


def judge_refusal(error: ApiError) -> None:
    assert 400 <= error.status < 500, error.status
    assert isinstance(json.loads(error.body())["error"]["message"], str)


def judge(leg: Any, expected: Any) -> None:
    assert leg.pop(KV_PARAMS, None) == expected
    assert not steers(leg), leg
    assert not any(name.startswith("pd_") for name in leg)


def steers(value: Any) -> bool:
    """Whether a key means KV, in any spelling that a reader of JSON might take for it."""
    if isinstance(value, dict):
        return any(means_kv(name) or steers(inner) for name, inner in value.items())
    return isinstance(value, list) and any(map(steers, value))


def means_kv(name: str) -> bool:
    letters = "".join(letter for letter in name.casefold() if letter not in "_- ")
    return letters in ("kvtransferparams", "ectransferparams")
