"""Which pods an edit replaces, and how often: one running PDDeployment per kind of edit, side by side.

`tests/unit/operator/test_render_children_rolls.py` has the table of every field; here it is shown for real that a
changed template is written once, rolls once, and that everything else stays as it is, down to the pods' identities.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import PATIENCE, ROLES, Role, Serving, is_ready
from support.cluster_serving_image import OTHER_IMAGE
from support.clusters import eventually
from support.pddeployments import edited

P, D, R = ROLES
EDITS: dict[str, tuple[str, Any, set[str]]] = {
    "bidirectional": ("spec.kvTransfer.bidirectional", "Disabled", {P, D, R}),
    "ttl": ("spec.kvTransfer.decoderBlocksTTLSeconds", 240, {P, D, R}),
    "threshold": ("spec.kvTransfer.recomputeThresholdTokens", 128, {P, D, R}),
    "image": ("spec.engine.image", OTHER_IMAGE, {P, D}),
    "revision": ("spec.model.revision", "abc123", {P, D}),
    "router": ("spec.router.limits.maxQueue", 7, {R}),
}
"""Name of the PDDeployment, the edited field, its new value, whose pods are replaced."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """One edit that is over: all workloads before and after, and the operator's writes of each."""

    before: dict[str, Role]
    after: dict[str, Role]
    writes: dict[str, int]
    generations: dict[str, set[str]]
    """Generation labels of the engines' pods, before and after."""


class Rollouts:
    """All edits, made at once."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.raw = {name: serving.start(name=name) for name in EDITS}
        for name in EDITS:
            serving.until_settled(name)
        before = {name: serving.roles(name) for name in EDITS}
        labels = {name: self._generations(name) for name in EDITS}
        since = serving.cluster.audit_position()
        for name, (path, value, _) in EDITS.items():
            self.raw[name] = edited(self.raw[name], (path, value))
            serving.apply(self.raw[name])
        for name in EDITS:
            serving.until_settled(name)
        serving.resynced()
        self.rolled = {
            name: Rolled(
                before[name],
                serving.roles(name),
                serving.template_writes(since, name),
                {"before": labels[name], "after": self._generations(name)},
            )
            for name in EDITS
        }

    def _generations(self, name: str) -> set[str]:
        pods = self.serving.pods(name, P) + self.serving.pods(name, D)
        return {pod["metadata"]["labels"]["pdserving.dev/generation"] for pod in pods}


@pytest.fixture(scope="module")
def rollouts(full_cluster: EmbeddedCluster) -> Iterator[Rollouts]:
    """A namespace in which every edit was made and is over."""
    with Serving(full_cluster, "rollouts") as serving:
        yield Rollouts(serving)


@pytest.mark.parametrize("name", EDITS)
def test_exactly_the_right_pods_roll_once(rollouts: Rollouts, name: str) -> None:
    rolled, expected = rollouts.rolled[name], EDITS[name][2]
    for role in ROLES:
        before, after = rolled.before[role], rolled.after[role]
        assert after.uid == before.uid
        assert all(restarts == 0 for _uid, restarts in after.pods.values())
        once = int(role in expected)
        assert rolled.writes[role] == once, role
        assert after.generation == before.generation + once, role
        # One more revision and no other in between: the template changed once.
        assert len(after.revisions - before.revisions) == once, role
        assert before.revisions <= after.revisions
        uids_before, uids_after = ({uid for uid, _ in one.pods.values()} for one in (before, after))
        assert len(uids_after) == 1
        assert (uids_before != uids_after) == bool(once), role
        if not once and role != R:
            # A router's status tells when it has no engines, so its version moves with theirs.
            assert after.resource_version == before.resource_version, role


@pytest.mark.parametrize("name", EDITS)
def test_both_roles_change_their_generation_together_or_not_at_all(rollouts: Rollouts, name: str) -> None:
    generations = rollouts.rolled[name].generations
    assert len(generations["before"]) == len(generations["after"]) == 1
    # D alone reads the time to live and P the threshold, so old and new pods may be paired.
    paired_apart = name in ("bidirectional", "image", "revision")
    assert (generations["before"] != generations["after"]) == paired_apart


def test_the_edits_arrived_in_the_pods(rollouts: Rollouts) -> None:
    serving = rollouts.serving
    [pod] = serving.pods("ttl", D)
    assert '"decoder_kv_blocks_ttl":240' in " ".join(pod["spec"]["containers"][0]["command"])
    [router] = serving.pods("ttl", R)
    command = router["spec"]["containers"][0]["command"]
    assert command[command.index("--engine-ttl") + 1] == "240"
    [off] = serving.router_status("bidirectional")
    assert off["reuse"] == "off"
    for kind in ("BidirectionalActive", "TransfersFlowing"):
        assert serving.until_condition("bidirectional", kind, "False")["reason"] == "Disabled"
    [pod] = serving.pods("image", P)
    assert pod["spec"]["containers"][0]["image"] == OTHER_IMAGE


def test_applying_the_same_files_again_writes_nothing(rollouts: Rollouts) -> None:
    serving = rollouts.serving
    serving.resynced()
    since = serving.cluster.audit_position()
    for raw in rollouts.raw.values():
        serving.apply(raw)
    serving.resynced(2)
    assert serving.operator_writes(since) == []


def test_a_restarted_operator_writes_nothing(rollouts: Rollouts) -> None:
    serving = rollouts.serving
    serving.resynced()
    before = {name: serving.roles(name) for name in EDITS}
    since = serving.cluster.audit_position()
    [old] = [pod["metadata"] for pod in serving.operator_pods()]
    serving.cluster.kubectl("-n", old["namespace"], "delete", "pod", old["name"])
    eventually("another operator", lambda: any(map(is_ready, serving.operator_pods())), PATIENCE)
    assert old["uid"] not in {pod["metadata"]["uid"] for pod in serving.operator_pods()}
    serving.resynced()
    assert serving.operator_writes(since) == []
    assert {name: serving.roles(name) for name in EDITS} == before


def test_no_engine_saw_a_breach(rollouts: Rollouts) -> None:
    assert rollouts.serving.judgement()["violations"] == []
