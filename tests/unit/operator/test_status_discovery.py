"""What a status says of routers that can't list the engines."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed import Child, Observed, Workload
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import Pod, Trouble
from pd_operator.core.observed_router import Flow, RouterAnswer
from pd_operator.core.problems import Problem
from pd_operator.core.reasons import ConditionType, Reason
from pd_operator.core.render_children import cluster_generation, render_children
from pd_operator.core.render_context import RenderContext
from pd_operator.core.status import Wish, compute_status
from pd_operator.core.status_events import happenings
from pd_operator.core.status_model import PDDeploymentStatus
from support.pddeployments import deployment

UID = "uid-of-qwen"
NOW = "2026-11-30T10:00:00Z"
UNAUTHORIZED = "refused: 401 Unauthorized"
DONE = {"current": True, "wanted": 1, "replicas": 1, "ready": 1, "updated": 1}
LOOP = Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 1: no NIXL plugin")
CONTEXT = RenderContext(UID, "r:1", "c:1")
MADE = deployment(("spec.engine.image", "v:v0.32.0"), ("metadata.namespace", "models"))
WISH = Wish(MADE, cluster_generation(MADE, CONTEXT), render_children(MADE, CONTEXT))


def answer(trouble: str = "") -> RouterAnswer:
    """What a router says that serves."""
    return RouterAnswer(reuse=True, pairs=True, flow=Flow.FLOWING, trouble=trouble)


def seen(
    *answers: RouterAnswer | None,
    asked: bool = True,
    status: PDDeploymentStatus | None = None,
    engine: Trouble | None = None,
    **numbers: Any,
) -> Observed:
    """A deployment of one engine each and a ready router per answer; numbers are those of the routers."""
    raw: dict[str, Any] = {"metadata": {"name": "qwen", "namespace": "models", "uid": UID, "generation": 1}}
    kinds = {"prefill": "StatefulSet", "decode": "StatefulSet", "router": "Deployment"}
    count = {"wanted": 1, "replicas": len(answers), "ready": len(answers), "updated": len(answers)}
    children = [
        Child(Ref(kind, "models", f"qwen-{role}"), f"uid-{role}", 5, "qwen", role, True, ("PDDeployment", "qwen", UID),
              workload=Workload(**{**DONE, **(count | {"wanted": len(answers)} | numbers if role == "router" else {}),
                                   **({"ready": 0} if engine and role == "prefill" else {})}))
        for role, kind in kinds.items()
    ]  # fmt: skip
    pods = [
        Pod("models", f"r-{n}", f"uid-r-{n}", 3, "qwen", "router", ready=True, created=NOW)
        for n in range(len(answers))
    ]  # fmt: skip
    pods += [Pod("models", "qwen-prefill-0", "uid-p", 3, "qwen", "prefill", trouble=engine)] if engine else []
    if status is not None:
        raw["status"] = status.document()
    return Observed(
        raw,
        {child.ref: child for child in children},
        tuple(pods),
        {f"r-{n}": one for n, one in enumerate(answers)} if asked else {},
    )


def judged(observed: Observed, wish: Wish = WISH) -> PDDeploymentStatus:
    """The status; the manifests ask for as many routers as there are."""
    count = sum(pod.role == "router" for pod in observed.pods)
    made = deployment(
        ("spec.engine.image", "v:v0.32.0"), ("metadata.namespace", "models"), ("spec.router.replicas", count)
    )
    return compute_status(Wish(made, wish.generation, render_children(made, CONTEXT)), observed, (), NOW)


def words(status: PDDeploymentStatus) -> dict[str, tuple[str, str]]:
    """Status and reason of each condition that is about the routers' sight."""
    kinds = (ConditionType.READY, ConditionType.ROUTER_READY, ConditionType.PROGRESSING)
    found = {kind.value: status.condition(kind) for kind in kinds}
    return {kind: (one.status.value, one.reason) for kind, one in found.items() if one is not None}


WELL = {"Ready": ("True", "AllReady"), "RouterReady": ("True", "AllReady"), "Progressing": ("False", "Complete")}
BLIND = {
    "Ready": ("True", "RouterBlind"),
    "RouterReady": ("True", "RouterBlind"),
    "Progressing": ("False", "RouterBlind"),
}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([answer()], WELL),
        ([answer(UNAUTHORIZED)], BLIND),
        ([answer(), answer(UNAUTHORIZED)], BLIND),
        ([answer(), None], WELL),
    ],
    ids=["sees", "blind", "one of two is blind", "one is silent"],
)
def test_blind_routers_are_told(answers: list[RouterAnswer | None], expected: dict[str, tuple[str, str]]) -> None:
    assert words(judged(seen(*answers))) == expected


@pytest.mark.parametrize(
    ("trouble", "way_out"),
    [
        (UNAUTHORIZED, "kubectl rollout restart deployment qwen-router"),
        ("refused: 403 Forbidden", "its Role and RoleBinding"),
        ("lost: TimeoutError", "its way to the API server"),
    ],
)
def test_the_message_says_who_why_and_what_to_do(trouble: str, way_out: str) -> None:
    status = judged(seen(answer(), answer(trouble)))
    for kind in (ConditionType.READY, ConditionType.ROUTER_READY, ConditionType.PROGRESSING):
        condition = status.condition(kind)
        assert condition is not None
        assert f"r-1 ({trouble})" in condition.message
        assert "r-0" not in condition.message
        assert way_out in condition.message


def test_of_many_routers_some_are_named() -> None:
    condition = judged(seen(*(answer(UNAUTHORIZED) for _ in range(5)))).condition(ConditionType.PROGRESSING)
    assert condition is not None
    assert "r-2 (refused: 401 Unauthorized) and 2 more can't list" in condition.message


def test_one_warning_tells_it() -> None:
    before = judged(seen(answer()))
    told = [one for one in happenings(before, judged(seen(answer(UNAUTHORIZED)))) if one.reason == "RouterBlind"]
    assert [one.kind for one in told] == ["Warning"]


def test_while_new_routers_come_in_that_is_what_progresses() -> None:
    status = judged(seen(answer(UNAUTHORIZED), replicas=2, updated=0, ready=1, wanted=1))
    assert words(status)["Progressing"][1] in ("RollingOut", "Scaling")
    assert words(status)["RouterReady"] == ("True", "RouterBlind")


def test_what_serves_no_request_is_said_first() -> None:
    status = judged(seen(answer(UNAUTHORIZED), engine=LOOP))
    assert words(status) == {
        "Ready": ("False", "CrashLooping"),
        "RouterReady": ("True", "RouterBlind"),
        "Progressing": ("False", "CrashLooping"),
    }


def test_a_refused_spec_does_not_hide_it() -> None:
    problem = Problem("spec.engine.image", "is empty")
    status = compute_status((problem,), seen(answer(UNAUTHORIZED)), (), NOW)
    assert words(status)["RouterReady"] == ("True", "RouterBlind")
    assert words(status)["Ready"] == ("False", "InvalidSpec")


def test_an_operator_that_has_asked_nobody_yet_changes_nothing() -> None:
    blind = judged(seen(answer(UNAUTHORIZED)))
    after = judged(seen(answer(UNAUTHORIZED), asked=False, status=blind))
    assert after.document()["conditions"][0] == blind.document()["conditions"][0]
    assert words(after) == BLIND
    assert words(judged(seen(answer(), status=blind))) == WELL
    assert words(judged(seen(answer(), asked=False, status=judged(seen(answer()))))) == WELL
