"""A PDDeployment from `kubectl apply` to reused KV, as a user sees it: real operator, routers and kubelets, and fake
engines that answer with a hash of the KV that they really had.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdctl.shell.cluster.cluster import EmbeddedCluster
from support import top_process
from support.cluster_serving import PATIENCE, Serving
from support.cluster_serving_engine import right_answer
from support.clusters import eventually

TURNS = 4


@pytest.fixture(scope="module")
def serving(full_cluster: EmbeddedCluster) -> Iterator[Serving]:
    """One pair that has talked with a client."""
    with Serving(full_cluster, "serving") as made:
        made.start()
        made.kubectl("wait", "--for=condition=Ready", "pdd/tiny", "--timeout=420s")
        yield made


@pytest.fixture(scope="module")
def talk(serving: Serving) -> list[dict[str, Any]]:
    """A conversation with the official client through the Service: each turn's messages, answer and usage."""
    url = serving.service_url()
    lines = serving.run_client("-m", "support.cluster_serving_client", "--url", url, "--turns", str(TURNS))
    return [json.loads(line) for line in lines.splitlines()]


def test_a_client_gets_right_answers_through_the_service(talk: list[dict[str, Any]]) -> None:
    assert len(talk) == TURNS
    for turn in talk:
        assert turn["text"] == right_answer({"model": "tiny", "messages": turn["messages"]})
        assert turn["finish_reason"] == "stop"


def test_every_turn_but_the_first_reuses_what_decode_kept(serving: Serving, talk: list[dict[str, Any]]) -> None:
    [status] = serving.router_status()
    assert status["reuse"] == "on"
    assert status["funnel"]["attached"] == TURNS - 1
    assert status["funnel"]["pulled"] == TURNS - 1
    # The whole blocks of everything that was said and answered before, of each follow-up.
    assert status["funnel"]["pulled_tokens"] > sum(turn["before"] for turn in talk) * 0.8


def test_no_rule_of_the_engine_contract_was_broken(serving: Serving, talk: list[dict[str, Any]]) -> None:
    judgement = serving.judgement()
    assert judgement["violations"] == judgement["notes"] == []
    assert sorted(judgement["engines"].values()) == ["tiny-decode-0", "tiny-prefill-0"]
    # Of each turn P's handle went to D, and D's went to P but for the last one.
    assert judgement["issued"] == 2 * len(talk)
    assert judgement["sent"] == 2 * len(talk) - 1


def test_the_conditions_say_that_reuse_works(serving: Serving, talk: list[dict[str, Any]]) -> None:
    flowing = serving.until_condition("tiny", "TransfersFlowing", "True")
    assert (flowing["reason"], flowing["message"]) == ("TokensPulled", "prefill pulls tokens from decode")
    for kind in ("Ready", "PrefillReady", "DecodeReady", "RouterReady", "BidirectionalActive"):
        assert serving.condition("tiny", kind)["status"] == "True", kind


def test_get_shows_what_a_user_wants_to_know(serving: Serving, talk: list[dict[str, Any]]) -> None:
    head, row = serving.kubectl("get", "pdd").splitlines()
    assert head.split() == ["NAME", "READY", "MODEL", "PREFILL", "DECODE", "ROUTER", "BIDIRECTIONAL", "AGE"]
    assert row.split()[:7] == ["tiny", "True", "example/tiny", "1/1", "1/1", "1/1", "True"]
    status = serving.get("pddeployments", "tiny")["status"]
    assert status["url"] == "http://tiny-router.serving.svc:80"
    assert status["engine"]["connectorVersion"]


TOP_RULES = [
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods/portforward"], "verbs": ["get", "create"]},
]


@pytest.fixture
def viewer(serving: Serving, tmp_path: Path) -> Path:
    """A kubeconfig of an account that may do what `pdctl top --name` says that it needs, and nothing else."""
    kind = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    role = {**kind, "kind": "Role", "metadata": {"name": "viewer"}, "rules": TOP_RULES}
    binding = {
        **kind,
        "kind": "RoleBinding",
        "metadata": {"name": "viewer"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "viewer"},
        "subjects": [{"kind": "ServiceAccount", "name": "viewer"}],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "viewer"}}
    serving.apply({"apiVersion": "v1", "kind": "List", "items": [account, role, binding]})
    config = yaml.safe_load(serving.cluster.kubeconfig.read_text(encoding="utf-8"))
    for user in config["users"]:
        user["user"] = {"token": serving.kubectl("create", "token", "viewer").strip()}
    path = tmp_path / "viewer"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def test_top_shows_the_routers_figures_through_forwarded_ports(
    serving: Serving, talk: list[dict[str, Any]], viewer: Path
) -> None:
    where = ("--name", "tiny", "-n", serving.namespace, "--kubeconfig", str(viewer))
    code, out, error = asyncio.run(top_process.run("--json", *where))
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert found["routers"] == 1
    assert found["answers"] >= len(talk)
    assert (found["funnel"]["attached"], found["funnel"]["pulled"]) == (TURNS - 1, TURNS - 1)
    assert found["pulled_tokens"] == serving.funnel("pulled_tokens")
    engines = {one["engine"]: one for one in found["engines"]}
    assert engines.keys() == {"tiny-prefill-0", "tiny-decode-0"}
    assert all(one["ready"] and one["kv_usage"] is not None for one in engines.values())
    code, out, error = asyncio.run(top_process.run("--once", *where))
    assert (code, error) == (0, "")
    assert "tiny-decode-0" in out


def test_events_tell_what_happened(serving: Serving) -> None:
    events = [one for one in serving.list("events") if one["involvedObject"]["kind"] == "PDDeployment"]
    told = {(event["reason"], event["type"]) for event in events}
    assert ("AllReady", "Normal") in told
    assert {event["reportingComponent"] or event["source"].get("component") for event in events} == {"pd-operator"}


def test_explain_has_words_for_every_field(serving: Serving) -> None:
    def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for name, inner in schema.get("properties", {}).items():
            yield f"{path}.{name}", inner

    crd = serving.api.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pddeployments.pdserving.dev")
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    transfer = dict(fields(schema["properties"]["kvTransfer"], "pdd.spec.kvTransfer"))
    assert "pdd.spec.kvTransfer.bidirectional" in transfer
    whole = serving.kubectl("explain", "pdd.spec.kvTransfer")
    for path, inner in transfer.items():
        text = serving.kubectl("explain", path)
        words = text.partition("DESCRIPTION:")[2].split()
        assert len(words) > 5, path
        assert " ".join(inner["description"].split()) in " ".join(text.split()), path
        assert path.rpartition(".")[2] in whole


def test_what_keeps_a_pod_from_beginning_is_told_in_the_kubelets_words(serving: Serving) -> None:
    volumes = [
        {"name": "absent", "mountPath": "/a", "configMap": {"name": "not-there"}},
        {"name": "folder", "mountPath": "/b", "hostPath": {"path": "/not/there"}},
    ]
    missing = {"name": "KEY", "secretKeyRef": {"name": "no-secret", "key": "key"}}
    serving.start(("spec.engine.volumes", volumes), name="volumes")
    serving.start(("spec.engine.selfTest", "Disabled"), ("spec.decode.env", [missing]), name="variable")

    def told(kind: str) -> bool:
        found = serving.condition("volumes", kind)
        words = found.get("message", "")
        both = 'configmap "not-there" not found' in words and "/not/there" in words
        return both and found["reason"] == "ContainerNotCreated"

    for kind in ("PrefillReady", "DecodeReady", "Progressing"):
        eventually(f"both volumes are named in {kind}", lambda: told(kind), PATIENCE)  # noqa: B023
    secret = 'secret "no-secret" not found'
    eventually(
        "the Secret", lambda: secret in serving.condition("variable", "DecodeReady").get("message", ""), PATIENCE
    )
    assert serving.condition("variable", "DecodeReady")["reason"] == "ContainerNotCreated"
    serving.kubectl("delete", "pdd", "volumes", "variable")


def test_a_pod_has_no_token_and_no_service_variables(serving: Serving) -> None:
    variables = serving.kubectl("exec", "tiny-decode-0", "-c", "engine", "--", "env")
    # Kubernetes' own variables are there with service links off; those of other Services are not.
    assert "JUDGE_PORT" not in variables
    assert "TINY_ROUTER" not in variables
    look = "test -e /var/run/secrets && echo there || echo nothing"
    found = serving.kubectl("exec", "tiny-decode-0", "-c", "engine", "--", "sh", "-c", look)
    assert found.strip() == "nothing"
