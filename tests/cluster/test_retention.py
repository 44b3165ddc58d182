"""`spec.kvTransfer.retention` is switched on a deployment that runs: which pods are replaced, and what the status says.

What an engine really does is known from its handles only, so each look is preceded by a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import PATIENCE, ROLES, Role, Serving
from support.cluster_serving_engine import FALLBACK, LEASE_API
from support.clusters import eventually

P, D, R = ROLES
WHY = "the KV cache has 2 groups"
HAVE_A_PAIR = "routers attach handles and have a pair of engines to use them with; decode retains"
STEPS: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "pinned": ({"kvTransfer": {"retention": "Pinned"}}, {P, D}, "Pinned"),
    "leased": ({"kvTransfer": {"retention": "Leased", "lease": {"seconds": 45}}}, {P, D, R}, "Leased"),
    "other leases": ({"kvTransfer": {"lease": {"sharePercent": 20}}}, {D}, "Leased"),
    "leases that the engine can't do": (
        {"decode": {"env": [{"name": FALLBACK, "value": WHY}]}},
        {D},
        f"Pinned, not Leased as spec.kvTransfer.retention asks, because {WHY}",
    ),
    "unpinned again": (
        {"kvTransfer": {"retention": "Unpinned", "lease": None}, "decode": {"env": []}},
        {D, R},
        "Unpinned",
    ),
}
"""The edit of the spec → whose pods are replaced, and what the status says of decode. Each follows the one before."""


@dataclass(frozen=True, slots=True)
class Step:
    """One edit that is over."""

    before: dict[str, Role]
    after: dict[str, Role]
    writes: dict[str, int]
    message: str
    router: dict[str, Any]
    decode_command: list[str]


class Retentions:
    """All steps, one after the other."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        serving.start(("spec.engine.selfTest", "Disabled"), name="kept")
        serving.until_settled("kept")
        self.first = self._said("Unpinned")
        self.steps = {name: self._step(*step) for name, step in STEPS.items()}

    def _step(self, edit: dict[str, Any], _rolled: set[str], expected: str) -> Step:
        serving, since = self.serving, self.serving.cluster.audit_position()
        before = serving.roles("kept")
        serving.patch("kept", edit)
        serving.until_settled("kept")
        serving.until_engines(1, 1, "kept")
        message = self._said(expected)
        [router] = serving.router_status("kept")
        [decode] = serving.pods("kept", D)
        command = decode["spec"]["containers"][0]["command"]
        return Step(before, serving.roles("kept"), serving.template_writes(since, "kept"), message, router, command)

    def _said(self, expected: str) -> str:
        """Talk, and wait until the status says what is expected of decode; what it said last."""
        serving, said = self.serving, ""
        url = serving.service_url("kept")
        serving.run_client("-m", "support.cluster_serving_client", "--url", url, "--turns", "3")

        def look() -> bool:
            nonlocal said
            said = serving.condition("kept", "BidirectionalActive").get("message", "")
            return bool(said == f"{HAVE_A_PAIR} {expected}")

        try:
            eventually(f"decode retains {expected}", look, PATIENCE / 4)
        except AssertionError:
            print(f"BidirectionalActive says: {said}")
        return said


@pytest.fixture(scope="module")
def retentions(full_cluster: EmbeddedCluster) -> Iterator[Retentions]:
    """A namespace in which every step was made."""
    with Serving(full_cluster, "retentions") as serving:
        yield Retentions(serving)


@pytest.mark.parametrize("name", STEPS)
def test_the_right_pods_roll_once(retentions: Retentions, name: str) -> None:
    step, rolled = retentions.steps[name], STEPS[name][1]
    for role in ROLES:
        before, after, once = step.before[role], step.after[role], int(role in rolled)
        assert (step.writes[role], after.generation - before.generation) == (once, once), role
        assert ({*before.pods.values()} != {*after.pods.values()}) == bool(once), role
        assert all(restarts == 0 for _uid, restarts in after.pods.values()), role


@pytest.mark.parametrize("name", STEPS)
def test_the_status_says_how_decode_retains_blocks_and_why(retentions: Retentions, name: str) -> None:
    assert retentions.first == f"{HAVE_A_PAIR} Unpinned"
    assert retentions.steps[name].message == f"{HAVE_A_PAIR} {STEPS[name][2]}"


def test_routers_prolong_leases_where_there_are_any(retentions: Retentions) -> None:
    for name in ("leased", "other leases"):
        assert LEASE_API in retentions.steps[name].decode_command
        leases = retentions.steps[name].router["leases"]
        assert leases["failures"] == 0
        # A turn's lease ends when the next turn's handle is kept.
        assert leases["released"] >= 1
    for name in ("pinned", "unpinned again"):
        assert LEASE_API not in retentions.steps[name].decode_command
        assert retentions.steps[name].router["leases"]["kept"] == 0


def test_turns_are_read_back_in_every_mode(retentions: Retentions) -> None:
    assert {name for name, step in retentions.steps.items() if not step.router["funnel"]["pulled_tokens"]} == set()
    judgement = retentions.serving.judgement()
    assert judgement["violations"] == judgement["notes"] == []
