"""A new generation through whole reconciles over a cluster in memory: what is written, how often, and by whom.

`tests/unit/operator/test_plan_rollout.py` has the decisions; `tests/cluster/test_rollout_steps.py` has Kubernetes' own
controllers.
"""

from __future__ import annotations

import pytest

from pd_operator.core.observed_kinds import Ref
from pd_operator.shell.run import Operator
from support.api_faults import FaultyPort, Killed
from support.operator_bench import Bench

ROLES = ("prefill", "decode")
SETS = {role: Ref("StatefulSet", "models", f"qwen-{role}") for role in ROLES}
NEW = ("spec.engine.image", "vllm:v0.32.1")


def template_generation(bench: Bench, role: str) -> str:
    """The generation of a role's live template."""
    labels = bench.cluster.objects[SETS[role]]["spec"]["template"]["metadata"]["labels"]
    return str(labels["pdserving.dev/generation"])


def partition(bench: Bench, role: str) -> int:
    """The live one; a server would default it."""
    return int(bench.cluster.objects[SETS[role]]["spec"]["updateStrategy"].get("rollingUpdate", {}).get("partition", 0))


def engines(bench: Bench, role: str, *generations: str, ready: int | None = None) -> None:
    """The role's pods by index; the last ones after `ready` of them are still starting."""
    count = len(generations) if ready is None else ready
    for index, generation in enumerate(generations):
        conditions = [{"type": "Ready", "status": str(index < count)}]
        labels = {
            "pdserving.dev/pddeployment": "qwen",
            "pdserving.dev/role": role,
            "pdserving.dev/generation": generation,
        }
        metadata = {"name": f"qwen-{role}-{index}", "namespace": "models", "labels": labels}
        bench.cluster.put(
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"generation": generation},
             "status": {"conditions": conditions}}
        )  # fmt: skip
    raw = bench.cluster.objects[SETS[role]]
    updated = sum(generation == template_generation(bench, role) for generation in generations)
    counts = {"replicas": len(generations), "readyReplicas": count, "availableReplicas": count}
    done = updated == len(generations)
    revisions = {"updateRevision": "r2", "currentRevision": "r2" if done else "r1", "updatedReplicas": updated}
    bench.cluster.set_status(SETS[role], {"observedGeneration": raw["metadata"]["generation"], **counts, **revisions})


async def two_and_two(bench: Bench, port: FaultyPort | None = None) -> Operator:
    """A pair of two and two that serves, and its operator."""
    bench.create(*((f"spec.{role}.replicas", 2) for role in ROLES))
    operator = await bench.operator(port)
    await bench.settle(operator)
    bench.serve_all()
    for role in ROLES:
        engines(bench, role, *[template_generation(bench, role)] * 2)
    await bench.settle(operator)
    assert bench.condition("Ready")["reason"] == "AllReady"
    bench.cluster.writes.clear()
    return operator


def set_writes(bench: Bench) -> list[str]:
    """Writes of StatefulSets, by role."""
    return [ref.name.removeprefix("qwen-") for verb, ref in bench.cluster.writes if verb == "apply"]


async def test_a_template_is_written_once_and_its_partition_is_taken_away_once(bench: Bench) -> None:
    operator = await two_and_two(bench)
    old = template_generation(bench, "decode")
    bench.change(NEW)
    await bench.settle(operator)
    new = template_generation(bench, "decode")
    assert new != old
    assert set_writes(bench) == ["prefill", "decode"]
    assert [partition(bench, role) for role in ROLES] == [1, 1]
    engines(bench, "decode", old, new)
    engines(bench, "prefill", old, new, ready=1)
    await bench.settle(operator)
    assert [partition(bench, role) for role in ROLES] == [1, 1]
    assert bench.condition("Ready")["status"] == "True"
    assert "kept until prefill has more new ones" in bench.condition("Progressing")["message"]
    engines(bench, "prefill", old, new)
    await bench.settle(operator)
    assert [partition(bench, role) for role in ROLES] == [0, 0]
    assert set_writes(bench) == ["prefill", "decode"] * 2
    for role in ROLES:
        engines(bench, role, new, new)
    await bench.settle(operator)
    await operator.resync_once()
    await bench.settle(operator)
    assert set_writes(bench) == ["prefill", "decode"] * 2
    assert bench.condition("Progressing")["reason"] == "Complete"


async def test_an_operator_that_begins_in_the_middle_writes_nothing_until_something_has_changed(bench: Bench) -> None:
    first = await two_and_two(bench)
    old = template_generation(bench, "decode")
    bench.change(NEW)
    await bench.settle(first)
    new = template_generation(bench, "decode")
    for role in ROLES:
        engines(bench, role, old, new, ready=1)
    await bench.settle(first)
    bench.stop(first)
    bench.cluster.writes.clear()
    second = await bench.operator()
    await bench.settle(second)
    assert bench.cluster.writes == []
    for role in ROLES:
        engines(bench, role, old, new)
    await bench.settle(second)
    assert sorted(set_writes(bench)) == sorted(ROLES)
    assert [partition(bench, role) for role in ROLES] == [0, 0]


@pytest.mark.parametrize("landed", [False, True], ids=["before the server did it", "after it"])
@pytest.mark.parametrize("call", [1, 2, 3, 4], ids=["first try", "second try", "first write", "second write"])
async def test_an_operator_killed_between_the_writes_leaves_a_pair(bench: Bench, call: int, landed: bool) -> None:
    port = FaultyPort(bench.cluster, landed=landed)
    first = await two_and_two(bench, port)
    old = template_generation(bench, "decode")
    port.at = port.count + call
    bench.change(NEW)
    with pytest.raises(Killed):
        await bench.settle(first)
    bench.stop(first)
    written = [role for role in ROLES if template_generation(bench, role) != old]
    assert written == list(ROLES[: max(0, call - 3 + (landed and call > 2))])
    assert [partition(bench, role) for role in written] == [1] * len(written)
    await bench.settle(await bench.operator())
    assert [partition(bench, role) for role in ROLES] == [1, 1]
    assert old not in [template_generation(bench, role) for role in ROLES]
    assert sorted(set_writes(bench)) == sorted(ROLES)


async def test_a_users_canary_is_kept_and_the_other_role_follows_it(bench: Bench) -> None:
    operator = await two_and_two(bench)
    old = template_generation(bench, "decode")
    bench.change(NEW, ("spec.prefill.updateStrategy.partition", 1))
    await bench.settle(operator)
    new = template_generation(bench, "decode")
    for role in ROLES:
        engines(bench, role, old, new)
    await bench.settle(operator)
    assert [partition(bench, role) for role in ROLES] == [1, 1]
    bench.change(("spec.prefill.updateStrategy", {}))
    await bench.settle(operator)
    assert [partition(bench, role) for role in ROLES] == [0, 0]


@pytest.mark.parametrize("role", ROLES)
async def test_a_partition_that_was_set_by_hand_is_taken_back_with_one_write(bench: Bench, role: str) -> None:
    operator = await two_and_two(bench)
    bench.cluster.edit(SETS[role], ("spec", "updateStrategy", "rollingUpdate", "partition"), 1)
    await bench.settle(operator)
    strategy = bench.cluster.objects[SETS[role]]["spec"]["updateStrategy"]
    assert strategy["rollingUpdate"]["partition"] == 0, "owned and written out, or a later edit waits for ever"
    assert set_writes(bench) == [role]
    await bench.assert_another_look_writes_nothing(operator)


async def test_a_partition_that_was_taken_away_by_hand_in_mid_rollout_comes_back(bench: Bench) -> None:
    operator = await two_and_two(bench)
    bench.change(NEW)
    await bench.settle(operator)
    held = [partition(bench, role) for role in ROLES]
    assert held == [1, 1]
    bench.cluster.writes.clear()
    bench.cluster.edit(SETS["decode"], ("spec", "updateStrategy", "rollingUpdate", "partition"), 2)
    await bench.settle(operator)
    assert [partition(bench, role) for role in ROLES] == held
    assert set_writes(bench) == ["decode"]


async def test_nothing_is_held_for_pods_that_a_user_deletes_by_hand(bench: Bench) -> None:
    operator = await two_and_two(bench)
    bench.change(NEW, *((f"spec.{role}.updateStrategy.type", "OnDelete") for role in ROLES))
    await bench.settle(operator)
    strategies = [bench.cluster.objects[SETS[role]]["spec"]["updateStrategy"] for role in ROLES]
    assert strategies == [{"type": "OnDelete"}] * 2


async def test_fewer_engines_wait_for_a_pair_of_those_that_stay(bench: Bench) -> None:
    operator = await two_and_two(bench)
    bench.change(NEW)
    await bench.settle(operator)
    new = template_generation(bench, "decode")
    for role in ROLES:
        engines(bench, role, new, new)
    # The first ones were replaced last and are still starting.
    pod = bench.cluster.objects[Ref("Pod", "models", "qwen-prefill-0")]
    bench.cluster.put({**pod, "status": {"conditions": []}})
    bench.change(*((f"spec.{role}.replicas", 1) for role in ROLES))
    await bench.settle(operator)
    assert [bench.cluster.objects[SETS[role]]["spec"]["replicas"] for role in ROLES] == [2, 2]
    assert "2 stay until those that are wanted make a pair" in bench.condition("Progressing")["message"]
    engines(bench, "prefill", new, new)
    await bench.settle(operator)
    assert [bench.cluster.objects[SETS[role]]["spec"]["replicas"] for role in ROLES] == [1, 1]
