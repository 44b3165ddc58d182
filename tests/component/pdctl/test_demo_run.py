"""The demo from end to end, with the real router and, in place of vLLM, engines that enforce the engine contract."""

import asyncio
import json
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from pd_operator.core.choices import Switch
from pd_operator.core.model import PDDeployment
from pdctl.core.commands import Urls
from pdctl.shell import demo_local, demo_report, demo_run
from pdctl.shell.app import app
from support.deployment import Deployment, Spec
from support.fake_engine import AnswerStyle, Behaviour

WORDS = [f" w{number:03d}" for number in range(500)]
"""All equally long, because the fake model's tokens are bytes."""
ARGUMENTS = ["demo", "--conversations", "2", "--turns", "3", "--longest", "900", "--step", "200", "--reply", "64"]


def stand_in(started: list[Deployment], handles_lost_in: str | None = None) -> type:
    """A `LocalDeployment` whose engines are fakes in this process."""

    class StandIn:
        def __init__(self, deployment: PDDeployment, *_others: object) -> None:
            self.reuse = deployment.spec.kv_transfer.bidirectional is Switch.ENABLED
            leg = "on" if self.reuse else "off"
            handles = self.reuse and handles_lost_in != leg
            self.deployment = Deployment(
                Spec(
                    connector=(("bidirectional", handles), ("prefix_caching", None)),
                    flags=(("--reuse", leg), ("--anonymous", "reuse")),
                )
            )

        @property
        def urls(self) -> Urls:
            running = self.deployment
            prefill = tuple(engine.url for engine in running.prefills)
            decode = tuple(engine.url for engine in running.decodes)
            return Urls(running.router.url, running.router.admin_url, prefill, decode, "tiny")

        async def check(self) -> None: ...

        async def start(self) -> None:
            await self.deployment.start()
            for engine in self.deployment.engines:
                engine.default = Behaviour(style=AnswerStyle(words=60))
            started.append(self.deployment)

        async def stop(self) -> None:
            assert self.deployment.fabric.take_violations() == []
            await self.deployment.stop()

        async def wait_failure(self) -> NoReturn:
            await asyncio.Event().wait()
            raise AssertionError("not reached")

    return StandIn


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """Runs the command; returns exit code, output, the records' file and the deployments that ran."""

    def run(handles_lost_in: str | None = None) -> tuple[int, str, dict, list[Deployment]]:
        started: list[Deployment] = []
        monkeypatch.setattr(demo_local, "LocalDeployment", stand_in(started, handles_lost_in))
        monkeypatch.setattr(demo_run, "read_words", lambda _model: WORDS)
        monkeypatch.setattr(demo_run, "WARM_UP_TOKENS", 100)
        monkeypatch.setattr(demo_report, "cached_tiny_model", lambda _say: Path("/nowhere"))
        result = CliRunner().invoke(app, [*ARGUMENTS, "--out", str(tmp_path)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output, json.loads((tmp_path / "records.json").read_text()), started

    return run


def test_both_legs_give_figures_and_only_one_pulls(run_demo):
    code, output, saved, started = run_demo()
    assert code == 0, output
    assert len(started) == 2
    records = saved["records"]
    assert len(records) == 2 * 2 * 3
    for record in records:
        reused = record["leg"] == "on" and record["turn"] > 1
        assert (record["pulled_tokens"] > 0) is reused
        assert (record["transfer_ms"] > 0) is reused
        assert record["ttft_ms"] >= record["prefill_ms"] > 0
        assert record["reported_tokens"] == (record["pulled_tokens"] or None)
    by_turn = {turn: {record["prompt_tokens"] for record in records if record["turn"] == turn} for turn in (1, 2, 3)}
    assert all(len(lengths) == 1 for lengths in by_turn.values())
    # What the turn before left at D is pulled, its reply included: nothing is lost on the way through text.
    for record in records:
        if record["leg"] == "on" and record["turn"] > 1:
            (before,) = by_turn[record["turn"] - 1]
            assert record["pulled_tokens"] > before
    assert len(saved["decisions"]) == len(records)
    assert {decision["linked_by"] for decision in saved["decisions"] if decision["attached"]} == {"history"}


def test_the_legs_share_no_text_and_no_conversation_has_an_id(run_demo):
    _, _, _, (off, on) = run_demo()
    texts = []
    for deployment in (off, on):
        bodies = [record.body for record in deployment.prefill.requests if "messages" in record.body]
        assert not any({"conversation_id", "session_id", "user"} & set(body) for body in bodies)
        texts.append({body["messages"][0]["content"] for body in bodies})
    # Two conversations and the warm-up in each leg.
    assert [len(text) for text in texts] == [3, 3]
    assert not texts[0] & texts[1]


def test_reuse_that_does_not_happen_is_a_failure(run_demo):
    code, output, saved, _ = run_demo(handles_lost_in="on")
    assert code == 1
    assert "FAILED: 4 faults" in output
    assert "reuse ON, conversation 1, turn 2: P pulled nothing from D" in output
    assert len(saved["faults"]) == 4
    assert saved["rows"] == []
