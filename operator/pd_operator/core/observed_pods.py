"""What is wrong with a pod, in one word and one sentence.

Separate because readiness comes from the workload's counts; pods are looked at only to say *why* something is not
ready, and because each rule here follows the kubelet's and the scheduler's words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.reasons import Reason
from pd_wire import names

LAST_WORDS: Final = 400
"""Most characters of a termination message that are kept, from its end: the cause of a traceback stands last."""

VERSION_LIMIT: Final = 64
"""Longest version that is believed."""

_PULL_REASONS: Final = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
)
_CREATE_REASONS: Final = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError"}
)
_BEFORE_THE_START: Final = ("ContainerCreating", "PodInitializing")
_FINAL_PHASES: Final = ("Failed", "Succeeded")
ADMIN_PORT: Final = "admin"
ACCOUNT_ANNOTATION: Final = f"{names.API_GROUP}/service-account-uid"
"""On a template and its pods: the uid of the account that they were made for, see `plan_accounts`."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not become ready."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of a PDDeployment.

    Attributes:
        revision: the StatefulSet's or ReplicaSet's hash of the template that it runs.
        generation: an engine's generation label, empty for a router.
        admin_port: a router's admin port, 0 for other pods.
        vllm_version: as the self-test found it in the engine's image; empty when it has not said.
        nixl_version: the same of NIXL.
        ends_by: when a pod in deletion must have ended, as an RFC 3339 time: the end of its grace period.
        finalizers: what a pod in deletion waits for besides its containers.
        not_begun: it has a node and no container of it has begun: volumes are mounted, or a network is made. What
            goes wrong there stands in no status, see `observed_events`.
        created: when it was made, as an RFC 3339 time.
        begun: a container of it runs or has run.
        runs: all of its containers run and have passed their startup probes; it may be unready all the same.
        finished: it failed or succeeded, so that nothing of it runs again.
        account: uid of the account that its template names, empty where it names none.
    """

    namespace: str
    name: str
    uid: str
    version: int
    deployment: str
    role: str
    revision: str = ""
    generation: str = ""
    ready: bool = False
    deleting: bool = False
    ip: str = ""
    admin_port: int = 0
    vllm_version: str = ""
    nixl_version: str = ""
    trouble: Trouble | None = None
    not_begun: bool = False
    ends_by: str = ""
    finalizers: tuple[str, ...] = ()
    node: str = ""
    created: str = ""
    begun: bool = False
    runs: bool = False
    finished: bool = False
    account: str = ""


def observe_pod(raw: Mapping[str, Any]) -> Pod:
    """Cut a pod from the API down to what decisions need."""
    metadata, spec, status = (raw.get(part) or {} for part in ("metadata", "spec", "status"))
    found = _self_test(status)
    labels = metadata.get("labels") or {}
    version = str(metadata.get("resourceVersion", ""))
    deleting = "deletionTimestamp" in metadata
    ready = any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )
    return Pod(
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        version=int(version) if version.isdigit() else 0,
        deployment=str(labels.get(names.LABEL_DEPLOYMENT, "")),
        role=str(labels.get(names.LABEL_ROLE, "")),
        revision=str(labels.get("controller-revision-hash") or labels.get("pod-template-hash") or ""),
        generation=str(labels.get(names.LABEL_GENERATION, "")),
        ready=ready and not deleting,
        deleting=deleting,
        ip=str(status.get("podIP", "")),
        admin_port=_admin_port(spec),
        vllm_version=_version(found, names.FOUND_VLLM),
        nixl_version=_version(found, names.FOUND_NIXL),
        trouble=None if ready or deleting else diagnose(spec, status),
        not_begun=not deleting and _not_begun(status),
        ends_by=str(metadata.get("deletionTimestamp") or ""),
        finalizers=tuple(map(str, metadata.get("finalizers") or ())) if deleting else (),
        node=str(spec.get("nodeName", "")),
        created=str(metadata.get("creationTimestamp") or ""),
        begun=any(map(_has_begun, status.get("containerStatuses") or ())),
        runs=not deleting and _runs(status),
        finished=status.get("phase") in _FINAL_PHASES,
        account=str((metadata.get("annotations") or {}).get(ACCOUNT_ANNOTATION, "")),
    )


def diagnose(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Trouble | None:
    """The first thing that keeps a pod from running, or None when it is merely starting."""
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Trouble(Reason.UNSCHEDULABLE, one_line(condition.get("message")))
    if status.get("phase") == "Failed":
        text = ": ".join(part for part in (str(status.get("reason", "")), one_line(status.get("message"))) if part)
        # A kubelet's sentences end in a full stop, and more is said after them.
        return Trouble(Reason.POD_FAILED, text.rstrip(" .") or "the pod failed")
    for container in _containers(status):
        trouble = _container_trouble(container)
        if trouble is not None:
            return trouble
    return None


def _has_begun(container: Mapping[str, Any]) -> bool:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    return bool(container.get("started") or "running" in state or "terminated" in state or "terminated" in last)


def _runs(status: Mapping[str, Any]) -> bool:
    containers = status.get("containerStatuses") or ()
    return status.get("phase") == "Running" and bool(containers) and all(one.get("started") for one in containers)


def _not_begun(status: Mapping[str, Any]) -> bool:
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or ()}
    if status.get("phase") != "Pending" or conditions.get("PodScheduled") != "True":
        return False
    if conditions.get("PodReadyToStartContainers") == "True":
        return False  # Images are pulled, which a status tells.
    states = [container.get("state") or {} for container in _containers(status)]
    return all((state.get("waiting") or {}).get("reason") in _BEFORE_THE_START for state in states)


def _container_trouble(container: Mapping[str, Any]) -> Trouble | None:
    name = container.get("name", "")
    waiting = (container.get("state") or {}).get("waiting") or {}
    why = waiting.get("reason", "")
    if why in _PULL_REASONS:
        image = container.get("image", "")
        return Trouble(Reason.IMAGE_PULL_FAILED, f"container {name}: image {image}{_pull_cause(waiting)}")
    if why in _CREATE_REASONS:
        return Trouble(Reason.CONTAINER_NOT_CREATED, f"container {name}: {one_line(waiting.get('message')) or why}")
    ended = _last_failure(container)
    if ended is None:
        return None
    # Between two crashes the container runs for a while; it stays in trouble until it has become ready.
    again = int(container.get("restartCount", 0)) > 0
    if why == "CrashLoopBackOff" or (again and not container.get("ready")):
        return Trouble(Reason.CRASH_LOOPING, f"container {name} {_how_it_ended(ended)}")
    return None


def _last_failure(container: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        ended = state.get("terminated")
        if ended and ended.get("exitCode") != 0:
            return dict(ended)
    return None


def _how_it_ended(ended: Mapping[str, Any]) -> str:
    why = ended.get("reason", "")
    text = f"ended with exit code {ended.get('exitCode')}"
    if why and why != "Error":
        text += f" ({why})"
    last = one_line(ended.get("message"), LAST_WORDS)
    return f"{text}: {last}" if last else text


def _pull_cause(waiting: Mapping[str, Any]) -> str:
    """The registry's words. A back-off repeats them after the first failure's name, or says nothing of use."""
    message = one_line(waiting.get("message"))
    _, found, cause = message.partition("ErrImagePull: ")
    if found:
        return f": {cause}"
    return "" if message.startswith("Back-off") or not message else f": {message}"


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for group in ("initContainerStatuses", "containerStatuses"):
        yield from status.get(group) or ()


def _self_test(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a self-test that passed has said. Of another release, or cut short by the kubelet, it may be anything."""
    for container in status.get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if container.get("name") == names.SELF_TEST_CONTAINER and ended.get("exitCode") == 0:
            try:
                found = json.loads(ended.get("message") or "{}")
            except ValueError:
                return {}
            return found if isinstance(found, Mapping) else {}
    return {}


def _version(found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    return value if isinstance(value, str) and len(value) <= VERSION_LIMIT else ""


def _admin_port(spec: Mapping[str, Any]) -> int:
    for container in spec.get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == ADMIN_PORT:
                return int(port.get("containerPort", 0))
    return 0


def one_line(value: Any, limit: int = 600) -> str:
    """Text without line breaks; of a longer one the end, where the cause stands."""
    text = " ".join(str(value or "").split())
    return text if len(text) <= limit else f"…{text[-limit + 1 :]}"
