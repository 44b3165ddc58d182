"""Two operators see one PDDeployment and would render it differently: one manages it, the other stands back."""

from __future__ import annotations

import copy

import pytest

from pd_operator.core.observed import OPERATOR_ANNOTATION
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.rivals import FIRST_RETRY, PATIENCE, SUSPICION
from pd_operator.shell.api import ApiError
from pd_operator.shell.run import Operator
from support.operator_bench import QWEN, Bench

ENGINES = tuple(Ref("StatefulSet", "models", f"qwen-{role}") for role in ("prefill", "decode"))
OWN = {"identity": "own/release", "connector_image": "c:1", "operator_namespace": "own"}
OTHER = {"identity": "other/release", "connector_image": "c:2", "operator_namespace": "other"}


async def pass_time(bench: Bench, seconds: float, *operators: Operator) -> None:
    """Both work whenever something is due, second by second."""
    end = bench.time + seconds
    while bench.time < end:
        bench.time += 1.0
        for operator in operators:
            while operator.wakeups.overdue() > 0.0:
                await operator.work_once()


def writers(bench: Bench) -> set[str]:
    return {bench.cluster.objects[ref]["metadata"]["annotations"][OPERATOR_ANNOTATION] for ref in ENGINES}


def template_writes(bench: Bench) -> list[int]:
    return [bench.cluster.objects[ref]["metadata"]["generation"] for ref in ENGINES]


async def managed(bench: Bench) -> Operator:
    """A PDDeployment that serves, and its operator."""
    bench.create()
    own = await bench.operator(**OWN)
    await bench.settle(own)
    bench.serve_all()
    await bench.settle(own)
    return own


async def test_the_one_that_is_there_keeps_it_and_the_other_stands_back(bench: Bench) -> None:
    own = await managed(bench)
    before, status = template_writes(bench), bench.cluster.objects[QWEN]["status"]
    other = await bench.operator(**OTHER)
    bench.cluster.writes.clear()
    await pass_time(bench, FIRST_RETRY - 1, own, other)
    assert template_writes(bench) == before
    assert writers(bench) == {"own/release"}
    assert bench.cluster.objects[QWEN]["status"] == status
    assert [kind for kind, _ in bench.cluster.writes] == ["apply", "apply", "event"], (
        "a question, its answer, and the news"
    )
    told = [one for one in bench.cluster.events if one["reason"] == "OtherOperator"]
    assert len(told) == 1
    assert "own/release manages this object, so the operator other/release does not" in told[0]["message"]


async def test_a_day_of_two_operators_costs_few_writes_and_no_engine(bench: Bench) -> None:
    own = await managed(bench)
    before = template_writes(bench)
    other = await bench.operator(**OTHER)
    bench.cluster.writes.clear()
    await pass_time(bench, 24 * 3600.0, own, other)
    assert template_writes(bench) == before
    assert len(bench.cluster.writes) <= 3 * (24 + 5)


async def test_a_change_of_the_spec_is_carried_out_by_the_one_that_manages(bench: Bench) -> None:
    own = await managed(bench)
    other = await bench.operator(**OTHER)
    await pass_time(bench, 100.0, own, other)
    bench.change(("spec.decode.replicas", 2))
    await pass_time(bench, 100.0, own, other)
    assert bench.cluster.objects[ENGINES[1]]["spec"]["replicas"] == 2
    assert writers(bench) == {"own/release"}


async def test_one_that_is_gone_is_followed_after_a_while(bench: Bench) -> None:
    own = await managed(bench)
    before = template_writes(bench)
    bench.stop(own)
    other = await bench.operator(**OTHER)
    await pass_time(bench, PATIENCE - 5, other)
    assert template_writes(bench) == before, "it waits for an answer"
    await pass_time(bench, 10.0, other)
    assert writers(bench) == {"other/release"}


async def test_one_that_stood_back_follows_when_the_other_has_gone(bench: Bench) -> None:
    own = await managed(bench)
    other = await bench.operator(**OTHER)
    await pass_time(bench, 100.0, own, other)
    bench.stop(own)
    await pass_time(bench, FIRST_RETRY + PATIENCE + 10, other)
    assert writers(bench) == {"other/release"}


def taken_over(operator: Operator) -> float | None:
    return operator._metrics.registry.get_sample_value("pd_operator_takeovers_total")


async def test_an_edit_shows_within_two_minutes_that_the_other_has_gone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    own = await managed(bench)
    other = await bench.operator(**OTHER)
    await pass_time(bench, 24 * 3600.0, own, other)  # so long that questions have become rare
    assert taken_over(other) == 0.0
    bench.stop(own)
    bench.change(("spec.decode.replicas", 3))
    bench.cluster.writes.clear()
    await pass_time(bench, SUSPICION - 2, other)
    assert bench.cluster.writes == []
    await pass_time(bench, PATIENCE + 10, other)
    assert writers(bench) == {"other/release"}
    assert bench.cluster.objects[ENGINES[1]]["spec"]["replicas"] == 3
    assert taken_over(other) == 1.0
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert any("own/release has not judged generation 2" in one for one in told)
    assert any("own/release gives no answer; this one manages the object now" in one for one in told)


async def test_one_that_answers_and_can_not_judge_is_suspected_once_per_edit(bench: Bench) -> None:
    own = await managed(bench)
    other = await bench.operator(**OTHER)
    await pass_time(bench, 100.0, own, other)

    async def refused(*_: object) -> object:
        raise ApiError(403, "Forbidden", "no right to write a status")

    bench.cluster.apply_status = refused  # type: ignore[method-assign,assignment]
    bench.change(("spec.decode.replicas", 2))
    await pass_time(bench, SUSPICION - 2, own, other)
    bench.cluster.writes.clear()
    await pass_time(bench, FIRST_RETRY - 100, own, other)
    told = [kind for kind, _ in bench.cluster.writes]
    assert told == ["apply", "apply", "event"], "one question, its answer, and the news"
    assert writers(bench) == {"own/release"}


async def test_a_question_survives_the_asker(bench: Bench) -> None:
    own = await managed(bench)
    before = template_writes(bench)
    bench.stop(own)
    for _ in range(3):
        other = await bench.operator(**OTHER)
        await pass_time(bench, PATIENCE - 5, other)
        bench.stop(other)
    assert template_writes(bench) == before
    other = await bench.operator(**OTHER)
    await pass_time(bench, PATIENCE + 5, other)
    assert writers(bench) == {"other/release"}


async def test_the_same_release_goes_on_at_once(bench: Bench) -> None:
    own = await managed(bench)
    bench.stop(own)
    upgraded = await bench.operator(**{**OWN, "connector_image": "c:2"})
    await pass_time(bench, 2.0, upgraded)
    images = str(bench.cluster.objects[ENGINES[0]]["spec"])
    assert "c:2" in images


async def test_engines_that_name_nobody_are_anybodys(bench: Bench) -> None:
    bench.create()
    former = await bench.operator(identity="")
    await bench.settle(former)
    bench.stop(former)
    own = await bench.operator(**OWN)
    await pass_time(bench, 2.0, own)
    assert writers(bench) == {"own/release"}


BAD = ("spec.engine.vllmVersion", "0.31.0")
"""Not what the image's tag says."""


async def test_the_status_of_a_refused_spec_is_the_other_operators_as_well(bench: Bench) -> None:
    own = await managed(bench)
    other = await bench.operator(**OTHER)
    await pass_time(bench, 100.0, own, other)
    bench.stop(own)  # so that nobody corrects what the other one writes
    status = copy.deepcopy(bench.cluster.objects[QWEN]["status"])
    bench.change(BAD)
    bench.cluster.writes.clear()
    await pass_time(bench, 100.0, other)
    assert bench.cluster.objects[QWEN]["status"] == status
    assert bench.cluster.writes == []


async def test_one_that_finds_a_refused_spec_of_another_tells_it_once_and_writes_no_status(bench: Bench) -> None:
    own = await managed(bench)
    bench.change(BAD)
    await pass_time(bench, 2.0, own)
    assert bench.condition("Ready")["reason"] == "InvalidSpec"
    status = copy.deepcopy(bench.cluster.objects[QWEN]["status"])
    other = await bench.operator(**OTHER)
    bench.cluster.writes.clear()
    await pass_time(bench, 24 * 3600.0, own, other)
    assert [kind for kind, _ in bench.cluster.writes] == ["event"]
    assert "the operator other/release refuses its spec" in bench.cluster.events[-1]["message"]
    assert bench.cluster.objects[QWEN]["status"] == status
    bench.stop(own)
    bench.change(("spec.engine.vllmVersion", "0.32.0"))
    await pass_time(bench, PATIENCE + 5, other)
    assert writers(bench) == {"other/release"}


@pytest.mark.parametrize("status", [503, 403], ids=["later", "refused"])
async def test_a_question_that_was_not_written_is_asked_again(bench: Bench, status: int) -> None:
    own = await managed(bench)
    bench.stop(own)
    other = await bench.operator(**OTHER)
    apply, failures = bench.cluster.apply, 3

    async def failing(manifest: dict[str, object], uid: str | None) -> object:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ApiError(status, "NotNow", "the server is not in the mood")
        return await apply(manifest, uid)

    bench.cluster.apply = failing  # type: ignore[method-assign,assignment]
    await pass_time(bench, 15.0, other)  # three pauses with jitter, and whole seconds in between
    assert failures < 0, "asked again as soon as any write that failed"
    assert writers(bench) == {"own/release"}
    await pass_time(bench, PATIENCE + 5, other)
    assert writers(bench) == {"other/release"}
    assert not [one for one in bench.cluster.events if one["reason"] == "OtherOperator"]
