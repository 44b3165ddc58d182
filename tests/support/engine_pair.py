"""A real pair behind the real router, and a client whose answers can be compared with recompute.

Separate from the tests because what "equal to recompute" means is decided here, once: the same messages are sent again
without a principal, which gives no reuse by the router, and with a cache salt of their own, because decode's prefix
cache would otherwise serve the very blocks that the answer under test was made from. The log-probabilities of the
generated tokens must agree within a tolerance. Texts are not compared: bfloat16 sums in another order may tip a tie.
Where an API tells no log-probabilities, its text may leave the recomputed one only at such a tie.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from pd_operator.core.choices import Connector
from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pdctl.shell.local import LocalDeployment, LocalOptions
from pdctl.shell.model_maker import cached_tiny_model, read_words
from support.router_process import RouterProcess

TOLERANCE = 0.05
"""Of a log-probability. Two recomputations of one prompt agree to 0.02; a wrong history differs by 0.3 or more."""
COMPARED_TOKENS = 4
Message = dict[str, Any]


def tiny_deployment(
    connector: str = "Verified",
    ttl: int = 300,
    decodes: int = 1,
    retention: str | None = None,
    router_ttl: int | None = None,
    **router_timeouts: int,
) -> PDDeployment:
    """The CPU example with the cached tiny model, and without reuse for requests that name no principal."""
    text = Path(__file__).parents[2].joinpath("examples", "cpu-tiny.yaml").read_text()
    value = yaml.safe_load(text)
    spec = value["spec"]
    spec["model"]["name"] = str(cached_tiny_model(print))
    spec["router"]["auth"]["anonymous"] = "NoReuse"
    spec["router"].setdefault("timeouts", {}).update(router_timeouts)
    spec["decode"]["replicas"] = decodes
    spec["kvTransfer"].update(connector=connector, decoderBlocksTTLSeconds=ttl)
    if retention is not None:
        spec["kvTransfer"]["retention"] = retention
    if router_ttl is not None:
        spec["kvTransfer"]["routerTTLSeconds"] = router_ttl
    spec["engine"].setdefault("extraArgs", []).extend(["--enable-auto-tool-choice", "--tool-call-parser", "hermes"])
    return parse_deployment(value)


def racing_deployment(block_tokens: int, decode_blocks: int, **transfer: Any) -> PDDeployment:
    """The same with small blocks and few of them on decode, and with vLLM's own ways to reset its cache.

    `transfer`: more of `spec.kvTransfer`.
    """
    wanted = tiny_deployment()
    value = wanted.model_dump(by_alias=True, mode="json", exclude_none=True)
    spec = value["spec"]
    spec["engine"]["blockSize"] = block_tokens
    spec["model"]["maxModelLen"] = min(spec["model"]["maxModelLen"], (decode_blocks - 1) * block_tokens)
    spec["decode"]["extraArgs"] = ["--num-gpu-blocks-override", str(decode_blocks)]
    spec["decode"]["env"] = [{"name": "VLLM_SERVER_DEV_MODE", "value": "1"}]
    spec["kvTransfer"].update(transfer)
    return parse_deployment(value)


@dataclass(slots=True)
class Answer:
    """One answer and what the router says about its turn."""

    message: Message
    logprobs: list[float]
    tokens: list[str]
    decision: dict[str, Any]
    others: list[dict[str, float]] = field(default_factory=list)
    """Log-probabilities of the likeliest tokens at each place, where they were asked for."""

    @property
    def attached(self) -> bool:
        """Whether a handle went out with the prefill."""
        return bool(self.decision["attached"])

    @property
    def pulled(self) -> int:
        """Tokens that P read back from D, as P reports them."""
        return int(self.decision.get("pulled_tokens") or 0)


@dataclass(slots=True)
class Pair:
    """A running deployment and an HTTP session."""

    deployment: LocalDeployment
    session: aiohttp.ClientSession
    _random: random.Random = field(default_factory=lambda: random.Random(7))
    _words: list[str] = field(default_factory=list)

    @classmethod
    async def start(cls, deployment: PDDeployment, log_dir: Path, racing: Path | None = None) -> Pair:
        """Start engines and router; about a minute. `racing`: the folder by which the test leads
        races, see `tests/support/at_start`."""
        env = {}
        if deployment.spec.kv_transfer.connector is Connector.STOCK:
            env["PD_TEST_REST"] = "1"
        if racing is not None:
            env["PD_TEST_RACE"] = str(racing)
        if env:
            at_start = str(Path(__file__).parent / "at_start")
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (at_start, os.environ.get("PYTHONPATH"))))
        local = LocalDeployment(deployment, LocalOptions(log_dir=log_dir, stop_grace=15, env=env))
        await local.start()
        session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240))
        return cls(local, session, _words=read_words(Path(deployment.spec.model.name)))

    async def stop(self) -> None:
        """Stop everything."""
        await self.session.close()
        await self.deployment.stop()

    def text(self, words: int) -> str:
        """Random words of the model's own vocabulary, one token each; never the same twice."""
        return "".join(self._random.choice(self._words) for _ in range(words)).strip()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        key: str | None = "tenant-a",
        conversation: str | None = None,
        max_tokens: int = 40,
        via: RouterProcess | None = None,
        **fields: Any,
    ) -> Answer:
        """One chat turn at temperature 0. `key` is the API key; None sends no principal. `via`: another router than
        the deployment's own."""
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            **fields,
        }
        if conversation is not None:
            body["conversation_id"] = conversation
        headers = {"authorization": f"Bearer {key}"} if key is not None else {}
        url = f"{via.url if via else self.deployment.urls.router}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
            request_id = response.headers["x-request-id"]
        choice = answer["choices"][0]
        content = choice["logprobs"]["content"]
        return Answer(
            message={"role": "assistant", "content": choice["message"]["content"]},
            logprobs=[item["logprob"] for item in content],
            tokens=[item["token"] for item in content],
            decision=await self.decision(request_id, via),
            others=[{one["token"]: one["logprob"] for one in item.get("top_logprobs") or ()} for item in content],
        )

    async def decision(self, request_id: str, via: RouterProcess | None = None) -> dict[str, Any]:
        """What `/debug/explain` says about a turn."""
        url = f"{via.admin_url if via else self.deployment.urls.admin}/debug/explain"
        async with self.session.get(url, params={"request_id": request_id}) as response:
            (found,) = await response.json()
        decision: dict[str, Any] = found
        return decision

    async def recompute(self, messages: Sequence[Message], **fields: Any) -> Answer:
        """The same turn without reuse of any kind."""
        answer = await self.ask(messages, key=None, cache_salt=uuid.uuid4().hex, **fields)
        assert not answer.attached
        return answer

    async def assert_equals_recompute(self, answer: Answer, messages: Sequence[Message], **fields: Any) -> None:
        """Compare with the same turn without reuse."""
        fresh = await self.recompute(messages, **fields)
        assert distance(answer, fresh) <= TOLERANCE, (
            f"differs from recompute by {distance(answer, fresh):.3f}: "
            f"{answer.tokens[:COMPARED_TOKENS]} {answer.logprobs[:COMPARED_TOKENS]} against "
            f"{fresh.tokens[:COMPARED_TOKENS]} {fresh.logprobs[:COMPARED_TOKENS]}; {answer.decision}"
        )

    async def assert_text_equals_recompute(self, text: str, messages: Sequence[Message], **fields: Any) -> None:
        """Compare a text that came without log-probabilities with the same turn as a chat without reuse."""
        fresh = await self.recompute(messages, top_logprobs=5, **fields)
        assert parts_at_a_tie(text, fresh), (text, fresh.tokens, fresh.others)


def parts_at_a_tie(text: str, fresh: Answer) -> bool:
    """Whether a text is the recomputed one, or leaves it where both ways were equally likely."""
    rest = text
    for token, others in zip(fresh.tokens, fresh.others, strict=True):
        if rest.startswith(token):
            rest = rest.removeprefix(token)
            continue
        best = max(others.values())
        return any(rest.startswith(other) and best - logprob <= 2 * TOLERANCE for other, logprob in others.items())
    return not rest


def distance(one: Answer, other: Answer) -> float:
    """Largest difference of a log-probability over the first tokens, as long as both chose the same ones."""
    worst = abs(one.logprobs[0] - other.logprobs[0])
    for place in range(1, min(COMPARED_TOKENS, len(one.tokens), len(other.tokens))):
        if one.tokens[:place] != other.tokens[:place]:
            break
        worst = max(worst, abs(one.logprobs[place] - other.logprobs[place]))
    return worst


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


@dataclass(slots=True)
class Pairs:
    """The pair that runs now. Asking for another one stops it: a start costs a minute of both cores."""

    new_folder: Callable[[str], Path]
    _wanted: PDDeployment | None = field(default=None)
    _running: Pair | None = field(default=None)

    async def use(self, deployment: PDDeployment, name: str, racing: Path | None = None) -> Pair:
        """A running pair of exactly this deployment; ``name`` names its log folder if it has to be started."""
        if self._running is None or self._wanted != deployment:
            await self.stop()
            self._running = await Pair.start(deployment, self.new_folder(name), racing)
            self._wanted = deployment
        return self._running

    async def stop(self) -> None:
        """Stop the pair if one runs."""
        running, self._running, self._wanted = self._running, None, None
        if running is not None:
            await running.stop()
