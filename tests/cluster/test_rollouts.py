"""Which pods an edit replaces, and how often: several running PDDeployments side by side, each with edits in turn.

`tests/unit/operator/test_render_children_rolls.py` has the table of every field; here it is shown for real that a
changed template is written once, rolls once, and that everything else stays as it is, down to the pods' identities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import PATIENCE, ROLES, LoadProcess, Role, Serving, is_ready
from support.cluster_serving_engine import LOAD_SECONDS
from support.cluster_serving_image import FAKE_IMAGE, OTHER_IMAGE
from support.clusters import eventually
from support.pddeployments import edited

P, D, R = ROLES
EDITS: dict[str, tuple[str, str, Any, set[str]]] = {
    "bidirectional": ("one", "spec.kvTransfer.bidirectional", "Disabled", {P, D, R}),
    "ttl": ("two", "spec.kvTransfer.decoderBlocksTTLSeconds", 240, {P, D, R}),
    "threshold": ("three", "spec.kvTransfer.recomputeThresholdTokens", 128, {P, D, R}),
    "router": ("one", "spec.router.limits.maxQueue", 7, {R}),
    "image": ("two", "spec.engine.image", OTHER_IMAGE, {P, D}),
    "revision": ("three", "spec.model.revision", "abc123", {P, D}),
}
"""The edit → name of the PDDeployment, the edited field, its new value, whose pods are replaced. Those of one
PDDeployment follow each other, since starting pods is what takes the time."""

PLACES = tuple(dict.fromkeys(place for place, *_ in EDITS.values()))
WITHOUT_TEST = ("spec.engine.selfTest", "Disabled")
"""One container less in each of many pods; other files have it."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """One edit that is over: all workloads before and after, and the operator's writes of each."""

    before: dict[str, Role]
    after: dict[str, Role]
    writes: dict[str, int]
    generations: dict[str, set[str]]
    """Generation labels of the engines' pods, before and after."""


class Rollouts:
    """All edits, made in as few rounds as there are edits of one PDDeployment."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.raw = {place: serving.start(WITHOUT_TEST, name=place) for place in PLACES}
        for place in PLACES:
            serving.until_settled(place)
        self.rolled: dict[str, Rolled] = {}
        left = list(EDITS)
        while left:
            places = {EDITS[name][0]: name for name in reversed(left)}
            self._round(list(places.values()))
            left = [name for name in left if name not in places.values()]

    def _round(self, names: list[str]) -> None:
        serving = self.serving
        before = {name: serving.roles(EDITS[name][0]) for name in names}
        labels = {name: self._generations(EDITS[name][0]) for name in names}
        since = serving.cluster.audit_position()
        for name in names:
            place, path, value, _ = EDITS[name]
            self.raw[place] = edited(self.raw[place], (path, value))
            serving.apply(self.raw[place])
        for name in names:
            serving.until_settled(EDITS[name][0])
        serving.resynced()
        for name in names:
            place = EDITS[name][0]
            self.rolled[name] = Rolled(
                before[name],
                serving.roles(place),
                serving.template_writes(since, place),
                {"before": labels[name], "after": self._generations(place)},
            )

    def _generations(self, place: str) -> set[str]:
        pods = self.serving.pods(place, P) + self.serving.pods(place, D)
        return {pod["metadata"]["labels"]["pdserving.dev/generation"] for pod in pods}


@pytest.fixture(scope="module")
def rollouts(full_cluster: EmbeddedCluster) -> Iterator[Rollouts]:
    """A namespace in which every edit was made and is over."""
    with Serving(full_cluster, "rollouts") as serving:
        yield Rollouts(serving)


@pytest.mark.parametrize("name", EDITS)
def test_exactly_the_right_pods_roll_once(rollouts: Rollouts, name: str) -> None:
    rolled, expected = rollouts.rolled[name], EDITS[name][3]
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
    [pod] = serving.pods("two", D)
    assert '"decoder_kv_blocks_ttl":240' in " ".join(pod["spec"]["containers"][0]["command"])
    [router] = serving.pods("two", R)
    command = router["spec"]["containers"][0]["command"]
    assert command[command.index("--engine-ttl") + 1] == "240"
    [off] = serving.router_status("one")
    assert off["reuse"] == "off"
    for kind in ("BidirectionalActive", "TransfersFlowing"):
        assert serving.until_condition("one", kind, "False")["reason"] == "Disabled"
    [pod] = serving.pods("two", P)
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
    before = {place: serving.roles(place) for place in PLACES}
    since = serving.cluster.audit_position()
    [old] = [pod["metadata"] for pod in serving.operator_pods()]
    serving.cluster.kubectl("-n", old["namespace"], "delete", "pod", old["name"])
    eventually("another operator", lambda: any(map(is_ready, serving.operator_pods())), PATIENCE)
    assert old["uid"] not in {pod["metadata"]["uid"] for pod in serving.operator_pods()}
    serving.resynced()
    assert serving.operator_writes(since) == []
    assert {place: serving.roles(place) for place in PLACES} == before


def test_no_engine_saw_a_breach(rollouts: Rollouts) -> None:
    assert rollouts.serving.judgement()["violations"] == []


# --- a new generation under load ----------------------------------------------------------------

SLOW_START = 10
"""Seconds for which a prefill engine loads beyond what a decode engine needs: those are up long before."""

MISSING_IMAGE = "localhost/fake-engine:missing"


class Watched:
    """Clients that talk to a pair of two and two, with prefill slow to start; Ready is noted with every look."""

    def __init__(self, serving: Serving, load: LoadProcess, name: str) -> None:
        self.serving, self.load, self.name = serving, load, name
        self.since = serving.cluster.audit_position()
        self.before = serving.roles(name)
        self.ready: set[str] = set()

    def patch(self, image: str) -> None:
        """A user changes the image, and with it the generation."""
        self.serving.patch(self.name, {"engine": {"image": image}})

    def until(self, what: str, reached: Callable[[], object]) -> None:
        """Look until something is reached. No client may see an error meanwhile."""

        def look() -> bool:
            assert self.load.report()["errors"] == []
            self.ready |= {self.serving.condition(self.name, "Ready").get("status", "not judged yet")}
            return bool(reached())

        try:
            eventually(what, look, PATIENCE)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.serving.describe()}") from None

    def progressing(self, reason: str) -> bool:
        """Is that the reason, on the newest spec?"""
        return bool(self.serving.condition(self.name, "Progressing").get("reason") == reason)

    def until_complete(self) -> None:
        """Look until every pod is new, and some answers longer."""
        self.until("the rollout is complete", lambda: self.progressing("Complete"))
        self.serving.until_settled(self.name)
        self.load.more_turns(12)
        assert self.ready <= {"True", "not judged yet"}

    def rolled(self) -> dict[str, tuple[int, int]]:
        """Per role of engines: the operator's writes of the StatefulSet, and new templates."""
        after, writes = self.serving.roles(self.name), self.serving.template_writes(self.since, self.name)
        return {role: (writes[role], len(after[role].revisions - self.before[role].revisions)) for role in (P, D)}


@pytest.fixture(scope="module")
def staged(full_cluster: EmbeddedCluster) -> Iterator[Serving]:
    """A namespace with two and two."""
    with Serving(full_cluster, "generations") as serving:
        load = [{"name": LOAD_SECONDS, "value": str(SLOW_START)}]
        edits = [
            (f"spec.{role}.{key}", value) for role in (P, D) for key, value in (("replicas", 2), ("minReadySeconds", 3))
        ]
        serving.start(*edits, ("spec.prefill.env", load), name="staged")
        serving.until_settled("staged")
        yield serving


@pytest.fixture
def watched(staged: Serving, tmp_path: Path) -> Iterator[Watched]:
    """The pair under load."""
    with staged.load(tmp_path, "staged") as load:
        load.more_turns(12)
        yield Watched(staged, load, "staged")
        assert load.report()["errors"] == []
    judgement = staged.judgement()
    assert judgement["violations"] == judgement["notes"] == []


def test_a_new_generation_is_not_seen_by_clients(watched: Watched) -> None:
    watched.patch(OTHER_IMAGE)
    watched.until("new engines of both", lambda: watched.progressing("RollingOut"))
    watched.until_complete()
    # The template comes with a partition, and one more write takes it away.
    assert watched.rolled() == {P: (2, 1), D: (2, 1)}


def test_a_generation_that_cannot_start_is_corrected_unseen_by_clients_and_by_another_operator(
    watched: Watched,
) -> None:
    watched.patch(MISSING_IMAGE)
    watched.until("the rollout is stuck", lambda: watched.progressing("RolloutStuck"))
    assert MISSING_IMAGE in watched.serving.condition("staged", "Progressing")["message"]
    watched.load.more_turns(12)
    assert watched.rolled() == {P: (1, 1), D: (1, 1)}
    [old] = [pod["metadata"] for pod in watched.serving.operator_pods()]
    watched.serving.cluster.kubectl("-n", old["namespace"], "delete", "pod", old["name"])
    watched.patch(FAKE_IMAGE)
    watched.until_complete()
    # Each template once, and one more write; the image of the first generation of all is known to the controllers.
    assert {role: writes for role, (writes, _revisions) in watched.rolled().items()} == {P: 3, D: 3}
