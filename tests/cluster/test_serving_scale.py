"""Each role is scaled up and down under load: nothing else moves, and no client sees it.

Clients try nothing twice, and each answer is compared with the one that the right KV gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import ROLES, Serving
from support.clusters import eventually

SOME_TURNS = 12
"""Answers between two changes, so that new engines are used and running answers meet every change."""


@pytest.fixture(scope="module")
def serving(full_cluster: EmbeddedCluster) -> Iterator[Serving]:
    """A namespace with one pair."""
    with Serving(full_cluster, "scaled") as made:
        made.start()
        made.until_settled()
        yield made


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_scaled_up_and_down_under_load(serving: Serving, role: str, tmp_path: Path) -> None:
    engines = {"prefill": 1, "decode": 1}
    with serving.load(tmp_path) as load:
        load.more_turns(SOME_TURNS)
        pulled = serving.funnel("pulled_tokens")
        for replicas in (2, 1):
            before = serving.roles()
            since = serving.cluster.audit_position()
            serving.patch("tiny", {role: {"replicas": replicas}})
            serving.until_rolled_out("tiny", role)
            serving.until_engines(**{**engines, **({role: replicas} if role in engines else {})})
            serving.until_settled()
            load.more_turns(SOME_TURNS)
            after = serving.roles()
            for other in set(ROLES) - {role}:
                assert after[other] == before[other], other
            assert serving.template_writes(since) == {**dict.fromkeys(ROLES, 0), role: 1}
            assert after[role].generation == before[role].generation + 1
            assert after[role].revisions == before[role].revisions
            # The pods that are in both are the same ones, and never restarted.
            common = before[role].pods.keys() & after[role].pods.keys()
            assert {name: before[role].pods[name] for name in common} == {n: after[role].pods[n] for n in common}
            assert (len(common), len(after[role].pods)) == (1, replicas)
            assert all(restarts == 0 for _uid, restarts in after[role].pods.values())
        report = load.report()
        assert report["errors"] == []
        # With a router more, or one less, handles of other conversations are elsewhere, but never all of them.
        assert serving.funnel("pulled_tokens") > (pulled if role != "router" else 0)
    judgement = serving.judgement()
    assert judgement["violations"] == judgement["notes"] == []
    assert judgement["sent"] > judgement["issued"] / 2


def test_kubectl_scale_scales_decode_and_scaled_engines_take_part(serving: Serving, tmp_path: Path) -> None:
    before = serving.roles()
    serving.kubectl("scale", "pdd/tiny", "--replicas=2")
    serving.until_settled()
    assert serving.kubectl("get", "pdd", "tiny", "-o", "jsonpath={.spec.decode.replicas}") == "2"
    scale = serving.cluster.api.get(
        f"/apis/pdserving.dev/v1alpha1/namespaces/{serving.namespace}/pddeployments/tiny/scale"
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    assert scale["status"]["selector"] == "pdserving.dev/pddeployment=tiny,pdserving.dev/role=decode"
    after = serving.roles()
    assert len(after["decode"].pods) == 2
    assert {role: after[role] for role in ("prefill", "router")} == {r: before[r] for r in ("prefill", "router")}
    serving.patch("tiny", {"prefill": {"replicas": 2}})
    serving.until_engines(prefill=2, decode=2)
    since = {pod: _turns(serving, pod) for pod in _engines(serving)}
    assert len(since) == 4
    with serving.load(tmp_path, talks=6) as load:
        eventually("every engine is used", lambda: all(_turns(serving, pod) > since[pod] for pod in since))
        assert load.report()["errors"] == []
    serving.kubectl("scale", "pdd/tiny", "--current-replicas=2", "--replicas=1")
    serving.until_settled()
    assert serving.roles()["decode"].pods == before["decode"].pods


def test_an_update_with_two_of_each_is_not_seen_by_clients(serving: Serving, tmp_path: Path) -> None:
    serving.patch("tiny", {role: {"replicas": 2} for role in ROLES})
    serving.until_engines(prefill=2, decode=2)
    serving.until_settled()
    before = serving.roles()
    with serving.load(tmp_path) as load:
        load.more_turns(SOME_TURNS)
        # Both roles and the router are told, and old and new engines may be paired.
        serving.patch("tiny", {"kvTransfer": {"decoderBlocksTTLSeconds": 240}})
        serving.until_settled()
        load.more_turns(SOME_TURNS)
        assert load.report()["errors"] == []
    after = serving.roles()
    for role in ROLES:
        old, new = ({uid for uid, _restarts in one[role].pods.values()} for one in (before, after))
        assert len(new) == 2
        assert not old & new, role
    assert serving.judgement()["violations"] == []


def test_an_autoscaled_role_keeps_its_number(serving: Serving) -> None:
    before = serving.roles()
    number = len(before["prefill"].pods)
    serving.patch("tiny", {"prefill": {"scaling": "External"}})
    serving.until_settled()
    since = serving.cluster.audit_position()
    serving.kubectl("scale", "statefulset/tiny-prefill", f"--replicas={number + 1}")
    serving.until_rolled_out("tiny", "prefill")
    serving.resynced()
    # Another change of the object makes a reconcile that applies, and it says nothing about that number either.
    serving.patch("tiny", {"decode": {"updateStrategy": {"type": "OnDelete"}}})
    serving.resynced()
    assert serving.get("statefulsets", "tiny-prefill")["spec"]["replicas"] == number + 1
    assert serving.get("pddeployments", "tiny")["status"]["prefill"]["ready"] == f"{number + 1}/{number + 1}"
    assert serving.template_writes(since) == {"prefill": 0, "decode": 1, "router": 0}
    serving.kubectl("scale", "statefulset/tiny-prefill", f"--replicas={number}")
    serving.until_rolled_out("tiny", "prefill")
    after = serving.roles()
    assert {role: after[role].pods for role in ROLES} == {role: before[role].pods for role in ROLES}


def _engines(serving: Serving) -> list[str]:
    pods = serving.pods("tiny", "prefill") + serving.pods("tiny", "decode")
    return [pod["status"]["podIP"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def _turns(serving: Serving, ip: str) -> float:
    """Prompt tokens that an engine has handled, from wherever they came."""
    lines = serving.fetch(f"http://{ip}:8000/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:prompt_tokens_by_source"))
