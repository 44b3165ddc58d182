"""Fake engines and the real router in front of them, with everything that a test checks after itself.

Separate from the fixtures so that what makes a deployment clean (no violation at an engine, no byte of a handle at a
client or in a log, nothing running, nothing leaked) is defined once and holds for every router test.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from pd_router.core.capabilities import parse_version
from pd_wire import names
from support.fake_engine import (
    SECRET,
    Answer,
    AnswerStyle,
    ConnectorConfig,
    EngineConfig,
    Fabric,
    FakeEngine,
    Record,
    Template,
    completion_prompts,
    expected_answer,
)
from support.fake_engine.apis import Api, as_chat, limit_of
from support.router_process import RouterProcess
from support.waiting import until

EXTRAS: Mapping[str, Any] = {
    "x_list": [[1, [2.5, None]], {"ü": "🙂\u2028"}],
    "x_big": 2**62,
    "x_float": 1e300,
    "x_empty": {},
}
"""Keys that no connector has, in every handle: a list of known keys or a number format would lose them."""

MARKERS = (
    names.KV_PARAMS,
    names.PROOF_KEY,
    names.REPORT_KEY,
    names.RETAIN_KEY,
    names.MODE_KEY,
    names.MOMENT_KEY,
    names.LEASE_KEY,
    "remote_block_ids",
    "remote_engine_id",
    "do_remote_",
)
"""Words that only a handle contains."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start. Equal specs can share one deployment, because tests use their own tenants and texts.

    Attributes:
        mode: the connector that both roles imitate.
        prefills, decodes: number of engines.
        template: of both roles.
        connector: `ConnectorConfig` fields of both roles.
        engine: `EngineConfig` fields of both roles.
        flags: router flags, as pairs; override those of `router_process.FLAGS`.
    """

    mode: Literal["stock", "verified"] = "verified"
    prefills: int = 1
    decodes: int = 1
    template: Template = field(default_factory=Template)
    connector: tuple[tuple[str, Any], ...] = ()
    engine: tuple[tuple[str, Any], ...] = ()
    flags: tuple[tuple[str, str], ...] = ()


class Deployment:
    """Engines and a router that run."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.fabric = Fabric()
        self.prefills = [self._engine("prefill") for _ in range(spec.prefills)]
        self.decodes = [self._engine("decode") for _ in range(spec.decodes)]
        self.seen: list[bytes] = []
        self.may_show: set[str] = set()
        self.ended = False
        """Set by a test that ends the router itself."""

        self._log_read = 0
        self._router: RouterProcess | None = None

    def _engine(self, role: Literal["prefill", "decode"]) -> FakeEngine:
        connector = ConnectorConfig(role, mode=self.spec.mode, handle_extras=EXTRAS, **dict(self.spec.connector))
        config = EngineConfig(
            connector, template=self.spec.template, **{"max_model_len": 1 << 20, **dict(self.spec.engine)}
        )
        return FakeEngine(config, self.fabric)

    @property
    def engines(self) -> list[FakeEngine]:
        """All engines, prefill first."""
        return [*self.prefills, *self.decodes]

    @property
    def prefill(self) -> FakeEngine:
        """The first prefill engine."""
        return self.prefills[0]

    @property
    def decode(self) -> FakeEngine:
        """The first decode engine."""
        return self.decodes[0]

    @property
    def router(self) -> RouterProcess:
        """The router."""
        assert self._router is not None
        return self._router

    async def start(self, *, ready: bool = True) -> None:
        """Start engines, then the router."""
        for engine in self.engines:
            await engine.start()
        hosts = [word for engine in self.engines for word in ("--allow-handle-host", engine.connector.host)]
        self._router = RouterProcess(
            [engine.url for engine in self.prefills],
            [engine.url for engine in self.decodes],
            dict(self.spec.flags),
            hosts,
        )
        await self._router.start(ready=ready)

    async def stop(self) -> None:
        """End everything, and look at the log for the last time."""
        try:
            if self._router is not None:
                await self._router.stop()
                self.check_log()
        finally:
            if self._router is not None:
                self._router.discard()
            for engine in self.engines:
                await engine.kill()

    async def heal(self) -> None:
        """Restart every engine and wait until the router has seen it: no breaker and no doubt is left from before."""
        for engine in self.engines:
            await engine.kill()
        await self.wait_ready(0)
        for engine in self.engines:
            await engine.restart()
        await self.wait_ready(len(self.engines))

    async def wait_ready(self, count: int) -> None:
        """Wait until the router sees exactly ``count`` engines as ready. Raises TimeoutError."""

        async def seen() -> bool:
            views: dict[str, list[bool]] = {}
            for member in await self._fleet():
                views.setdefault(member["engine"], []).append(member["ready"])
            # With several workers each has its own view: of one that is away nobody may say that it is there.
            return sum(map(all if count else any, views.values())) == count

        await until(seen)

    async def wait_versions(self) -> None:
        """Wait until the router knows the release of every engine that tells one. Raises TimeoutError."""
        telling = {engine.url for engine in self.engines if parse_version(engine.config.version) is not None}

        async def known() -> bool:
            return all(one["version"] is not None for one in await self._fleet() if one["engine"] in telling)

        await until(known)

    def reset(self) -> None:
        """Forget what earlier tests did; engines keep their memory and the router its store."""
        for engine in self.engines:
            engine.forget()
        self.seen.clear()
        self.may_show.clear()

    # --- what is right ------------------------------------------------------------------------

    def right(
        self,
        body: Mapping[str, Any],
        style: AnswerStyle | None = None,
        choice: int = 0,
        prompt: int = 0,
        api: Api | None = None,
    ) -> Answer:
        """The answer to a client's body when everything is recomputed; ``api`` is needed for Messages only."""
        api = api or ("chat" if "messages" in body else "responses" if "input" in body else "completions")
        asked = as_chat(api, body)
        ids = completion_prompts(body)[prompt] if api == "completions" else self.spec.template.render(asked)
        model, limit = body.get("model", "tiny"), limit_of(api, body)
        return expected_answer(ids, model=model, style=style, body=asked, choice=choice, limit=limit)

    # --- what must hold after each test -------------------------------------------------------

    async def check(self) -> None:
        """Raise AssertionError unless the deployment is clean."""
        for engine in self.engines:
            await engine.idle(15.0)
        assert self.fabric.take_violations() == []
        assert (self.router.returncode is None) is not self.ended, self.router.log
        if not self.ended:
            await self._check_at_rest()
        self.check_seen()
        self.check_log()

    async def _check_at_rest(self) -> None:
        """Every share of an engine's load was given back."""

        async def at_rest() -> bool:
            return not any(member["turns"] or member["prefill_tokens"] for member in await self._fleet())

        await until(at_rest)

    async def _fleet(self) -> list[dict[str, Any]]:
        url = self.router.admin_url + "/debug/fleet"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            members: list[dict[str, Any]] = await response.json()
        return members

    def check_seen(self) -> None:
        """No client byte tells anything about a handle or a lease."""
        for data in self.seen:
            assert not any(token.encode() in data for token in self.fabric.tokens), (
                f"a lease's token in {data[:2000]!r}"
            )
            found = SECRET.search(data)
            shown = found.group().decode() if found else ""
            assert shown in {"", *self.may_show}, f"{shown} in {data[:2000]!r}"
            for word in set(MARKERS) - self.may_show:
                assert word.encode() not in data, f"{word} in {data[:2000]!r}"

    def check_log(self) -> None:
        """What the router logged since the last check names no handle, and no fault of its own."""
        log = self.router.log[self._log_read :]
        self._log_read += len(log)
        found = SECRET.search(log.encode())
        assert found is None, f"{found and found.group()!r} in the router's log"
        for word in (names.PROOF_KEY, "remote_block_ids", names.LEASE_KEY, *self.fabric.tokens):
            assert word not in log, f"{word} in the router's log"
        for word in ("Traceback", "Warning:", "was never awaited", "exception was never retrieved"):
            assert word not in log, log

    # --- looking inside -----------------------------------------------------------------------

    def records(self, engines: Iterable[FakeEngine] | None = None) -> list[Record]:
        """Requests for tokens at these engines (all by default)."""
        return [record for engine in (engines or self.engines) for record in engine.generates]

    async def metrics(self) -> dict[str, float]:
        """The router's metrics page: sample name with labels, to value."""
        async with aiohttp.ClientSession() as session, session.get(self.router.admin_url + "/metrics") as response:
            text = await response.text()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def explain(self) -> list[dict[str, Any]]:
        """The router's last decisions, oldest first."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.router.admin_url + "/debug/explain") as response,
        ):
            raw = await response.read()
        self.seen.append(raw)
        decisions: list[dict[str, Any]] = json.loads(raw)
        return decisions
