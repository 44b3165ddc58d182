"""What a pod's trouble is called, from statuses as kubelets and schedulers write them."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed_pods import LAST_WORDS, Trouble, observe_pod
from pd_operator.core.reasons import Reason


def raw(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """A pod object."""
    labels = {"pdserving.dev/pddeployment": "qwen", "pdserving.dev/role": "decode"}
    return {
        "metadata": {"name": "qwen-decode-0", "namespace": "models", "uid": "u", "resourceVersion": "9",
                     "labels": labels, **metadata},
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": status,
    }  # fmt: skip


def container(**fields: Any) -> dict[str, Any]:
    """A status with one container."""
    return {"containerStatuses": [{"name": "engine", "image": "vllm:x", "ready": False, "restartCount": 0, **fields}]}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    """The state of a container that waits."""
    return {"waiting": {"reason": reason, "message": message}}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """The state of a container that ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


PENDING = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
CASES: dict[str, tuple[dict[str, Any], Trouble | None]] = {
    "nothing known": ({}, None),
    "starting": (container(state={"running": {}}), None),
    "creating": (container(state=waiting("ContainerCreating")), None),
    "unschedulable": (
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": PENDING}]},
        Trouble(Reason.UNSCHEDULABLE, PENDING),
    ),
    "image not found": (
        container(state=waiting("ErrImagePull", 'failed to pull "vllm:x":\n not found')),
        Trouble(Reason.IMAGE_PULL_FAILED, 'container engine: image vllm:x: failed to pull "vllm:x": not found'),
    ),
    "image back-off": (
        container(state=waiting("ImagePullBackOff", 'Back-off pulling image "vllm:x": ErrImagePull: unauthorized')),
        Trouble(Reason.IMAGE_PULL_FAILED, "container engine: image vllm:x: unauthorized"),
    ),
    "image back-off without a cause": (
        container(state=waiting("ImagePullBackOff", 'Back-off pulling image "vllm:x"')),
        Trouble(Reason.IMAGE_PULL_FAILED, "container engine: image vllm:x"),
    ),
    "secret missing": (
        container(state=waiting("CreateContainerConfigError", 'secret "hf" not found')),
        Trouble(Reason.CONTAINER_NOT_CREATED, 'container engine: secret "hf" not found'),
    ),
    "crash loop": (
        container(
            state=waiting("CrashLoopBackOff"), lastState=ended(1, message="Traceback\n  no LIBFABRIC"), restartCount=3
        ),
        Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 1: Traceback no LIBFABRIC"),
    ),
    "out of memory": (
        container(state=waiting("CrashLoopBackOff"), lastState=ended(137, "OOMKilled"), restartCount=1),
        Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 137 (OOMKilled)"),
    ),
    "running again after a crash": (
        container(state={"running": {}}, lastState=ended(1, message="boom"), restartCount=2),
        Trouble(Reason.CRASH_LOOPING, "container engine ended with exit code 1: boom"),
    ),
    "ended, first time": (container(state=ended(1, message="boom")), None),
    "recovered": (container(state={"running": {}}, lastState=ended(1), restartCount=2, ready=True), None),
    "self-test fails": (
        {"initContainerStatuses": [{"name": "self-test", "state": waiting("CrashLoopBackOff"), "restartCount": 1,
                                    "lastState": ended(3, message="vLLM 0.99 is not supported")}]},
        Trouble(Reason.CRASH_LOOPING, "container self-test ended with exit code 3: vLLM 0.99 is not supported"),
    ),
    "refused by the node": (
        {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"},
        Trouble(Reason.POD_FAILED, "UnexpectedAdmissionError: no healthy devices"),
    ),
    "evicted, in the kubelet's words": (
        {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. "},
        Trouble(Reason.POD_FAILED, "Evicted: The node was low on resource: memory"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("status", "trouble"), CASES.values(), ids=CASES.keys())
def test_trouble(status: dict[str, Any], trouble: Trouble | None) -> None:
    assert observe_pod(raw(status)).trouble == trouble


def test_of_a_long_last_message_the_end_is_kept() -> None:
    status = container(state=waiting("CrashLoopBackOff"), lastState=ended(1, message="x" * 5000 + " the cause"))
    trouble = observe_pod(raw(status)).trouble
    assert trouble is not None
    assert trouble.message.endswith("the cause")
    assert len(trouble.message) < LAST_WORDS + 60


@pytest.mark.parametrize("metadata", [{"deletionTimestamp": "2026-11-30T10:00:00Z"}])
def test_a_pod_in_deletion_is_neither_ready_nor_in_trouble(metadata: dict[str, Any]) -> None:
    status = {"conditions": [{"type": "Ready", "status": "True"}], **container(state=waiting("CrashLoopBackOff"))}
    pod = observe_pod(raw(status, **metadata))
    assert (pod.ready, pod.deleting, pod.trouble) == (False, True, None)


RUNNING = {"state": {"running": {}}}
OVER = {"phase": "Failed", "reason": "Evicted"}


@pytest.mark.parametrize(
    ("status", "begun", "runs", "finished"),
    [
        ({"phase": "Pending", **container(state=waiting("ContainerCreating"))}, False, False, False),
        ({"phase": "Running", **container(**RUNNING, started=False)}, True, False, False),
        ({"phase": "Running", **container(**RUNNING, started=True)}, True, True, False),
        ({"phase": "Running"}, False, False, False),
        ({"phase": "Running", **container(state=waiting("CrashLoopBackOff"), lastState=ended(1))}, True, False, False),
        ({**OVER, **container(state=ended(137), started=False)}, True, False, True),
        (OVER, False, False, True),
        ({"phase": "Succeeded", **container(state=ended(0))}, True, False, True),
    ],
    ids=["creating", "starts up", "has started", "unknown", "crashed", "evicted", "refused", "succeeded"],
)
def test_how_far_a_pod_has_come(status: dict[str, Any], begun: bool, runs: bool, finished: bool) -> None:
    pod = observe_pod(raw(status, creationTimestamp="2026-11-30T10:00:00Z"))
    assert (pod.begun, pod.runs, pod.finished, pod.created) == (begun, runs, finished, "2026-11-30T10:00:00Z")


def test_what_an_ending_pod_waits_for() -> None:
    value = raw({}, deletionTimestamp="2026-11-30T10:00:00Z", finalizers=["a.io/b"])
    value["spec"]["nodeName"] = "n7"
    pod = observe_pod(value)
    assert (pod.ends_by, pod.finalizers, pod.node) == ("2026-11-30T10:00:00Z", ("a.io/b",), "n7")
    assert observe_pod(raw({}, finalizers=["a.io/b"])).finalizers == ()


def test_facts_of_a_router_pod() -> None:
    value = raw({"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.7"})
    value["spec"]["containers"][0]["ports"].append({"name": "admin", "containerPort": 9000})
    value["metadata"]["labels"]["pod-template-hash"] = "abc"
    pod = observe_pod(value)
    assert (pod.ready, pod.ip, pod.admin_port, pod.revision, pod.version) == (True, "10.0.0.7", 9000, "abc", 9)


def self_test(message: Any, code: int = 0, name: str = "selftest") -> dict[str, Any]:
    """The status of a pod whose self-test has ended."""
    ended = {"terminated": {"exitCode": code, "reason": "Completed", "message": message}}
    return {"initContainerStatuses": [{"name": name, "ready": True, "restartCount": 0, "state": ended}]}


REPORTS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "both": (self_test('{"vllm": "0.32.0+cu130", "nixl": "1.1.0"}'), ("0.32.0+cu130", "1.1.0")),
    "more than is known today": (self_test('{"vllm": "0.32.0", "nixl": "1.1.0", "x": [1]}'), ("0.32.0", "1.1.0")),
    "nothing said": (self_test(None), ("", "")),
    "no JSON": (self_test("all 9 checks passed"), ("", "")),
    "cut short": (self_test('{"vllm": "0.3'), ("", "")),
    "no object": (self_test('["0.32.0"]'), ("", "")),
    "no text": (self_test('{"vllm": 0.32, "nixl": null}'), ("", "")),
    "too long": (self_test(f'{{"vllm": "{"1" * 65}", "nixl": "1.1.0"}}'), ("", "1.1.0")),
    "failed": (self_test('{"vllm": "0.32.0"}', code=1), ("", "")),
    "another container": (self_test('{"vllm": "0.32.0"}', name="connector"), ("", "")),
    "still running": ({"initContainerStatuses": [{"name": "selftest", "state": {"running": {}}}]}, ("", "")),
}


@pytest.mark.parametrize("case", REPORTS.values(), ids=REPORTS.keys())
def test_versions_that_the_self_test_found(case: tuple[dict[str, Any], tuple[str, str]]) -> None:
    status, versions = case
    pod = observe_pod(raw(status))
    assert (pod.vllm_version, pod.nixl_version) == versions


def test_the_generation_of_an_engine() -> None:
    labels = {"pdserving.dev/role": "decode", "pdserving.dev/generation": "0123456789"}
    assert observe_pod(raw({}, labels=labels)).generation == "0123456789"
    assert observe_pod(raw({})).generation == ""


ON_A_NODE = {"type": "PodScheduled", "status": "True"}
NOT_BEGUN: dict[str, tuple[dict[str, Any], bool]] = {
    "no status yet": ({"phase": "Pending", "conditions": [ON_A_NODE]}, True),
    "creating": (
        {**container(state=waiting("ContainerCreating")), "phase": "Pending", "conditions": [ON_A_NODE]}, True,
    ),
    "initializing": (
        {**container(state=waiting("PodInitializing")), "phase": "Pending", "conditions": [ON_A_NODE]}, True,
    ),
    "not scheduled": ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False"}]}, False),
    "pulling": (
        {
            **container(state=waiting("ContainerCreating")),
            "phase": "Pending",
            "conditions": [ON_A_NODE, {"type": "PodReadyToStartContainers", "status": "True"}],
        },
        False,
    ),
    "pull failed": (
        {**container(state=waiting("ErrImagePull")), "phase": "Pending", "conditions": [ON_A_NODE]}, False,
    ),
    "an init container runs": (
        {
            "initContainerStatuses": [{"name": "connector", "state": {"running": {}}}],
            **container(state=waiting("PodInitializing")),
            "phase": "Pending",
            "conditions": [ON_A_NODE],
        },
        False,
    ),
    "running": ({**container(state={"running": {}}), "phase": "Running", "conditions": [ON_A_NODE]}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_BEGUN.values(), ids=NOT_BEGUN.keys())
def test_a_pod_has_not_begun_while_volumes_or_a_network_may_lack(case: tuple[dict[str, Any], bool]) -> None:
    status, expected = case
    assert observe_pod(raw(status)).not_begun is expected
    assert not observe_pod(raw(status, deletionTimestamp="2026-01-01T00:00:00Z")).not_begun
