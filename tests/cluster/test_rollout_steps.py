"""A new generation comes in, step by step: the real operator and Kubernetes' own controllers, with the test as kubelet.

The test decides which engine becomes ready and when. At every look it notes whether some pair could serve, and the
server's audit log says how often a StatefulSet was written.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdctl.shell.cluster.api import ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.cluster_serving import is_ready
from support.clusters import eventually
from support.operator_lab import STRATEGIC, Lab
from support.operator_process import OperatorProcess

P, D = ROLES = ("prefill", "decode")
IMAGES = {"a": "r.example/vllm:v0.32.0", "b": "r.example/vllm:v0.32.1", "c": "r.example/vllm:v0.32.2"}
LOOP = {
    "name": "engine",
    "image": "x",
    "imageID": "",
    "ready": False,
    "restartCount": 3,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no such kernel"}},
}


class Stage:
    """One PDDeployment whose engines come up when the test says so."""

    def __init__(self, lab: Lab, prefill: int, decode: int) -> None:
        self.lab = lab
        self.operator = lab.operator("--resync", "600", "--router-poll", "600")
        self.numbers = {P: prefill, D: decode}
        self.edits: dict[str, Any] = {
            **{f"spec.{role}.replicas": number for role, number in self.numbers.items()},
            **{f"spec.{role}.minReadySeconds": 1 for role in ROLES},
            # Nobody takes these pods, or the scheduler would say that there is no node.
            **{f"spec.{role}.pod.schedulerName": "nobody" for role in ROLES},
        }
        self.apply("a")
        self.looks: list[bool] = []
        self.cant_start: dict[str, str] = {}
        """By role the image from which no engine starts any more."""
        self.until("a router", lambda: lab.pods("router"))
        for pod in lab.pods("router"):
            lab.report(pod, _running())
        self.until_complete(prefill="a", decode="a")
        self.since = lab.cluster.audit_position()
        self.revisions = self._revisions()
        self.looks.clear()

    def apply(self, image: str, **edits: Any) -> None:
        """A user edits the object."""
        self.edits |= {"spec.engine.image": IMAGES[image], **{f"spec.{key}": value for key, value in edits.items()}}
        self.lab.create(*self.edits.items())

    def engines(self, role: str) -> list[tuple[str, str, bool]]:
        """Name, image and readiness of each engine that is not ending."""
        found = []
        for pod in self.lab.pods(role):
            if "deletionTimestamp" not in pod["metadata"]:
                found.append((pod["metadata"]["name"], _image(pod), is_ready(pod)))
        return sorted(found)

    def look(self, **up: str) -> bool:
        """Make the roles' engines of the named images ready, note whether a pair serves, and tell it."""
        for role, image in self.cant_start.items():
            for pod in self.lab.pods(role):
                if _image(pod) == image and not is_ready(pod) and "containerStatuses" not in pod["status"]:
                    with contextlib.suppress(ApiError):
                        self.lab.report(pod, {"containerStatuses": [LOOP]})
        for role, images in up.items():
            for pod in self.lab.pods(role):
                if _image(pod) in images and not is_ready(pod):
                    with contextlib.suppress(ApiError):
                        self.lab.report(pod, _running())
        ready = [{image for _, image, is_up in self.engines(role) if is_up} for role in ROLES]
        self.looks.append(bool(ready[0] & ready[1]))
        return self.looks[-1]

    def until(self, what: str, reached: Callable[[], object], **up: str) -> None:
        """Look until something is reached."""

        def look() -> bool:
            self.look(**up)
            return bool(reached())

        eventually(what, look)

    def images(self, role: str) -> str:
        """The engines' images by index, such as `ab`."""
        return "".join(image for _, image, _ in self.engines(role))

    def followed(self) -> bool:
        """Whether the StatefulSets' controller has read what the operator wrote."""
        sets = [self.lab.get(self.lab.ref("StatefulSet", f"qwen-{role}")) for role in ROLES]
        return all(one["status"].get("observedGeneration") == one["metadata"]["generation"] for one in sets)

    def until_complete(self, **up: str) -> None:
        """Look until the rollout is over."""

        def complete() -> bool:
            raw = self.lab.get(self.lab.ref("PDDeployment"))
            found = self.lab.condition("Progressing")
            return found.get("observedGeneration") == raw["metadata"]["generation"] and found["reason"] == "Complete"

        self.until("rollout is complete", complete, **up)

    def held(self) -> None:
        """Wait until the operator has nothing to do, and see that the controllers do nothing either."""
        self.lab.settled(self.operator)
        before = [self.engines(role) for role in ROLES]
        for _ in range(10):
            self.look()
        assert [self.engines(role) for role in ROLES] == before

    def restart_operator(self) -> OperatorProcess:
        """Another process in place of the one that ran."""
        assert self.operator.terminate() == 0
        self.operator = self.lab.operator("--resync", "600", "--router-poll", "600")
        return self.operator

    def available(self, role: str) -> int:
        """Engines that the role's StatefulSet counts as ready for long enough."""
        status = self.lab.get(self.lab.ref("StatefulSet", f"qwen-{role}"))["status"]
        return int(status.get("availableReplicas", 0))

    def strategy(self, role: str) -> dict[str, Any]:
        """How the role's StatefulSet replaces pods now."""
        found: dict[str, Any] = self.lab.get(self.lab.ref("StatefulSet", f"qwen-{role}"))["spec"]["updateStrategy"]
        return found

    def writes(self, role: str) -> int:
        """How often the operator wrote the role's StatefulSet since the first rollout was over."""
        return self.lab.written(self.since).count(f"patch statefulsets qwen-{role}")

    def new_revisions(self, role: str) -> int:
        """Templates that came since then."""
        return len(self._revisions()[role] - self.revisions[role])

    def _revisions(self) -> dict[str, set[str]]:
        path = f"/apis/apps/v1/namespaces/{self.lab.namespace}/controllerrevisions"
        names = [one["metadata"]["name"] for one in self.lab.api.get(path)["items"]]
        return {role: {name for name in names if name.startswith(f"qwen-{role}-")} for role in ROLES}


def _running() -> dict[str, Any]:
    """The status of a pod that has become ready this second; controllers count from there."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": now}
        for kind in ("PodScheduled", "Ready", "ContainersReady")
    ]
    return {
        "phase": "Running",
        "conditions": conditions,
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
    }


def _image(pod: dict[str, Any]) -> str:
    [engine] = pod["spec"]["containers"]
    return next(letter for letter, image in IMAGES.items() if image == engine["image"])


@pytest.fixture
def lab(light_cluster: EmbeddedCluster, namespace: str, tmp_path: Path) -> Iterator[Lab]:
    """A namespace of its own."""
    made = Lab(light_cluster, namespace, tmp_path)
    yield made
    made.close()


def test_two_and_two_serve_all_the_time_although_prefill_is_slow(lab: Lab) -> None:
    stage = Stage(lab, 2, 2)
    stage.apply("b")
    stage.until("decode is ahead", lambda: stage.images(D) == "ab", decode="b")
    stage.until("a new prefill engine", lambda: stage.images(P) == "ab", decode="b")
    stage.held()
    assert (stage.images(P), stage.images(D)) == ("ab", "ab")
    told = lab.condition("Progressing")
    assert (told["status"], told["reason"]) == ("True", "RollingOut")
    assert "1 of an earlier generation kept until prefill has more new ones" in told["message"]
    assert lab.condition("Ready")["reason"] == "Serving"
    stage.until_complete(prefill="b", decode="b")
    assert all(stage.looks)
    assert {role: (stage.writes(role), stage.new_revisions(role)) for role in ROLES} == dict.fromkeys(ROLES, (2, 1))


def test_a_generation_that_never_starts_leaves_the_old_one_serving_until_it_is_corrected(lab: Lab) -> None:
    stage = Stage(lab, 2, 2)
    stage.apply("b")
    stage.until("new engines", lambda: (stage.images(P), stage.images(D)) == ("ab", "ab"))
    for role in ROLES:
        [pod] = [one for one in lab.pods(role) if _image(one) == "b"]
        lab.report(pod, {"containerStatuses": [LOOP]})
    assert "no such kernel" in lab.until_condition("Progressing", "False", "RolloutStuck")["message"]
    assert lab.condition("Ready")["status"] == "True"
    stage.held()
    writes = {role: stage.writes(role) for role in ROLES}
    lab.settled(stage.restart_operator())
    stage.held()
    assert {role: stage.writes(role) for role in ROLES} == writes
    stage.apply("c")
    stage.until("corrected engines", lambda: (stage.images(P), stage.images(D)) == ("ac", "ac"))
    stage.until_complete(prefill="c", decode="c")
    assert all(stage.looks)
    assert {role: (stage.writes(role), stage.new_revisions(role)) for role in ROLES} == dict.fromkeys(ROLES, (3, 2))


def test_a_rollback_in_the_middle_takes_only_what_is_new(lab: Lab) -> None:
    stage = Stage(lab, 3, 3)
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for role in ROLES for pod in lab.pods(role)}
    stage.apply("b")
    stage.until("one new prefill engine", lambda: stage.images(P) == "aab", prefill="b")
    stage.until("one new decode engine", lambda: stage.images(D) == "aab", prefill="b")
    stage.held()
    stage.apply("a")
    stage.until_complete(prefill="a", decode="a")
    after = {pod["metadata"]["name"]: pod["metadata"]["uid"] for role in ROLES for pod in lab.pods(role)}
    assert all(stage.looks)
    assert {name for name in after if after[name] != before[name]} == {"qwen-prefill-2", "qwen-decode-2"}


@pytest.mark.parametrize("prefill", [2, 3])
def test_an_engine_that_cant_start_any_more_holds_no_rollout_up(lab: Lab, prefill: int) -> None:
    stage = Stage(lab, prefill, 2)
    stage.until("all were ready for long enough", lambda: stage.available(P) == prefill)
    stage.cant_start[P] = "a"
    broken = lab.ref("Pod", "qwen-prefill-0")
    uids = [lab.get(broken)["metadata"]["uid"]]
    # It takes its time to end, so that the operator sees the role without it.
    lab.patch(broken, {"metadata": {"finalizers": ["example.org/slow"]}})
    failed = {"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [LOOP]}
    lab.report(lab.get(broken), failed)
    stage.until("it is known", lambda: "no such kernel" in lab.condition("PrefillReady")["message"])
    stage.apply("b")
    stage.until("it is given up", lambda: "deletionTimestamp" in lab.get(broken)["metadata"], decode="b")
    assert (stage.images(P), stage.images(D)) == ("a" * (prefill - 1), "ab"), "decode first, and no other with it"
    lab.settled(stage.operator)
    # A controller that has not read the newest partition makes the pod from an older one.
    stage.until("its controller has followed", stage.followed)
    lab.patch(broken, {"metadata": {"finalizers": None}})

    def is_new() -> bool:
        pod = lab.get(broken)
        uids.extend({pod["metadata"]["uid"]} - {*uids})
        return _image(pod) == "b"

    stage.until("it is new", is_new, decode="b")
    assert len(uids) == 2, "it comes back once, and not as it was"
    stage.held()
    stage.until_complete(prefill="b", decode="b")
    assert all(stage.looks)


def test_a_user_who_deletes_pods_by_hand_is_let_go_on_in_the_middle(lab: Lab) -> None:
    stage = Stage(lab, 2, 2)
    stage.apply("b")
    stage.until("new engines", lambda: (stage.images(P), stage.images(D)) == ("ab", "ab"))
    stage.apply("b", **{f"{role}.updateStrategy": {"type": "OnDelete"} for role in ROLES})
    lab.settled(stage.operator)
    assert [stage.strategy(role) for role in ROLES] == [{"type": "OnDelete"}] * 2
    stage.apply("b", **{f"{role}.updateStrategy": {"type": "RollingUpdate"} for role in ROLES})
    lab.settled(stage.operator)
    assert [stage.strategy(role)["rollingUpdate"]["partition"] for role in ROLES] == [1, 1]
    stage.until_complete(prefill="b", decode="b")
    # Without one, the controller makes what goes missing in the next rollout from the earlier template.
    assert [stage.strategy(role)["rollingUpdate"]["partition"] for role in ROLES] == [0, 0]
    assert all(stage.looks)


def test_numbers_change_in_the_middle_one_of_them_by_an_autoscaler(lab: Lab) -> None:
    stage = Stage(lab, 2, 2)
    stage.apply("a", **{"prefill.scaling": "External"})
    lab.settled(stage.operator)
    stage.apply("b")
    stage.until("new engines", lambda: (stage.images(P), stage.images(D)) == ("ab", "ab"), decode="b")
    lab.patch(lab.ref("StatefulSet", "qwen-prefill"), {"spec": {"replicas": 3}})
    stage.apply("b", **{"decode.replicas": 4})
    stage.until("more of the new ones", lambda: (stage.images(P), stage.images(D)) == ("abb", "abbb"), decode="b")
    stage.held()
    stage.until_complete(prefill="b", decode="b")
    assert (stage.images(P), stage.images(D)) == ("bbb", "bbbb")
    stage.apply("c", **{"decode.replicas": 2})
    stage.until_complete(prefill="c", decode="c")
    assert (stage.images(P), stage.images(D)) == ("ccc", "cc")
    assert all(stage.looks)


def test_a_pair_of_single_engines_goes_together_and_says_so(lab: Lab) -> None:
    stage = Stage(lab, 1, 1)
    stage.apply("b")
    stage.until("both are new", lambda: (stage.images(P), stage.images(D)) == ("b", "b"))
    told = lab.until_condition("Progressing", "True", "ServiceGap")
    assert "requests get a 503 until then" in told["message"]
    assert lab.condition("Ready")["status"] == "False"
    stage.until_complete(prefill="b", decode="b")
    assert {role: (stage.writes(role), stage.new_revisions(role)) for role in ROLES} == dict.fromkeys(ROLES, (1, 1))


@contextlib.contextmanager
def refused_by_policy(lab: Lab, name: str, image: str) -> Iterator[None]:
    """Admission refuses one StatefulSet with that image."""
    rule = f"object.metadata.name != '{name}' || object.spec.template.spec.containers[0].image != '{image}'"
    group = "/apis/admissionregistration.k8s.io/v1"
    where = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": lab.namespace}},
        "resourceRules": [
            {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["*"], "resources": ["statefulsets"]}
        ],
    }
    metadata = {"name": lab.namespace}
    policy = {
        "metadata": metadata,
        "spec": {"matchConstraints": where, "validations": [{"expression": rule, "message": "no such image here"}]},
    }
    binding = {"metadata": metadata, "spec": {"policyName": lab.namespace, "validationActions": ["Deny"]}}
    ref = lab.ref("StatefulSet", name)
    tried = {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": image}]}}}}

    def refuses() -> bool:
        try:
            lab.api.request("PATCH", f"{lab.path(ref)}?dryRun=All", tried, STRATEGIC)
        except ApiError as error:
            return "no such image here" in str(error)
        return False

    lab.api.request("POST", f"{group}/validatingadmissionpolicies", policy)
    lab.api.request("POST", f"{group}/validatingadmissionpolicybindings", binding)
    try:
        eventually("the policy is in force", refuses)
        yield
    finally:
        for plural in ("validatingadmissionpolicybindings", "validatingadmissionpolicies"):
            lab.api.request("DELETE", f"{group}/{plural}/{lab.namespace}")


@pytest.mark.parametrize("role", ROLES)
def test_an_edit_of_which_one_role_is_refused_leaves_the_pair_as_it_is(lab: Lab, role: str) -> None:
    stage = Stage(lab, 1, 1)
    pods = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in lab.pods()}
    with refused_by_policy(lab, f"qwen-{role}", IMAGES["b"]):
        stage.apply("b")
        told = lab.until_condition("Progressing", "False", "ApplyRefused")["message"]
        assert f"the API server refuses StatefulSet qwen-{role}: " in told
        assert "no such image here" in told
        assert "requests are served as before, and it is tried again" in told
        for kind in ("Ready", "PrefillReady", "DecodeReady", "RouterReady"):
            assert lab.condition(kind)["status"] == "True"
        for _ in range(10):
            stage.look()
        assert {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in lab.pods()} == pods
        assert all(stage.looks)
        assert lab.written(stage.since) == []
    stage.until_complete(prefill="b", decode="b")


def test_a_single_engine_goes_when_the_other_role_has_a_new_one(lab: Lab) -> None:
    stage = Stage(lab, 1, 2)
    stage.apply("b")
    stage.until("decode has begun", lambda: stage.images(D) == "ab")
    stage.held()
    assert (stage.images(P), stage.images(D)) == ("a", "ab")
    assert all(stage.looks)
    assert "then requests get a 503" in lab.condition("Progressing")["message"]
    stage.until("prefill follows", lambda: stage.images(P) == "b", decode="b")
    stage.until_complete(prefill="b", decode="b")
