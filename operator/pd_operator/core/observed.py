"""What was seen of one PDDeployment and its surroundings, as frozen values.

Raw objects are cut down to what decisions need the moment they arrive: an operator that mirrors thousands of children
must not keep their bodies. Separate from `plan` and `status` so that both decide from the same facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pd_operator.core.names import MANAGED_BY
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import ACCOUNT_ANNOTATION, Pod, one_line
from pd_operator.core.observed_router import RouterAnswer
from pd_wire import names

MANAGER: Final = "pd-operator"
"""Field manager of every write but one."""

HAND_OVER_MANAGER: Final = "pd-operator-handover"
"""Holds a field for the moment in which the operator lets go of it, until its new owner writes it."""

REPAIR_MANAGER: Final = "pd-operator-repair"
"""Field manager of what `plan_repair` puts back; the apply that follows takes it over."""

HASH_ANNOTATION: Final = f"{names.API_GROUP}/rendered-hash"
OPERATOR_ANNOTATION: Final = f"{names.API_GROUP}/operator"
"""Which operator wrote a child: NAMESPACE/RELEASE."""

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"

IMMUTABLE: Final = {
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Deployment": ("selector",),
}
"""Fields of `spec` that an API server refuses to change after creation, by kind."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The numbers of a StatefulSet or Deployment.

    Attributes:
        begun: the controller has seen it at all.
        current: the controller has seen the newest spec, so the counts are about it.
        wanted: replicas asked for in the spec, whoever set them.
        available: pods that have been ready for `minReadySeconds`.
        partition: a StatefulSet replaces no pod with a smaller index.
        generation: label of the live template.
        account: uid of the account that the live template names, empty where it names none.
        deadline_passed: a Deployment's own verdict that its rollout is stuck.
        paused: somebody has told a Deployment to begin no rollout. The operator never does.
        pods_refused: why a Deployment's pods are not made; a StatefulSet does not say, see `Observed.pods_refused`.
        immutable: the fixed fields of the spec, as JSON text.
    """

    current: bool = False
    wanted: int = 1
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    available: int = 0
    partition: int = 0
    generation: str = ""
    account: str = ""
    current_revision: str = ""
    update_revision: str = ""
    deadline_passed: bool = False
    paused: bool = False
    pods_refused: str = ""
    begun: bool = True
    immutable: str = "{}"

    @property
    def lacks_pods(self) -> bool:
        """Has the controller not made all pods, although it knows how many are wanted?"""
        return self.current and self.replicas < self.wanted


@dataclass(frozen=True, slots=True)
class Child:
    """One object that is, or stands in the place of, a child.

    Attributes:
        version: resourceVersion as a number; larger is newer.
        deployment: name of the PDDeployment in its label.
        managed: carries the managed-by label of this operator.
        owner: (kind, name, uid) of its controller, empty texts without one.
        operator: which operator wrote it, see `rivals`.
        owned_fields: `fieldsV1` of this operator's apply, as JSON text; empty when it never applied.
        repaired: fields are still owned by a repair, which an apply brings to its end.
        created: when the API server made it, as an RFC 3339 time.
    """

    ref: Ref
    uid: str
    version: int
    deployment: str = ""
    role: str = ""
    managed: bool = False
    owner: tuple[str, str, str] = ("", "", "")
    rendered_hash: str = ""
    operator: str = ""
    owned_fields: str = ""
    repaired: bool = False
    deleting: bool = False
    workload: Workload | None = None
    created: str = ""

    def belongs_to(self, uid: str) -> bool:
        """Is the PDDeployment with that uid its controller?"""
        return bool(uid) and self.owner[0] == names.KIND and self.owner[2] == uid


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that one reconcile looks at."""

    raw: Mapping[str, Any]
    children: Mapping[Ref, Child] = field(default_factory=dict)
    pods: tuple[Pod, ...] = ()
    routers: Mapping[str, RouterAnswer | None] = field(default_factory=dict)
    """Ready router pods by name; None = asked and no answer. A pod that was not asked yet is absent."""
    pods_refused: Mapping[Ref, str] = field(default_factory=dict)
    """Why pods of a StatefulSet are not made, where its controller has told."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The object's metadata."""
        return _mapping(self.raw.get("metadata"))

    @property
    def name(self) -> str:
        """Name of the PDDeployment."""
        return str(self.metadata.get("name", ""))

    @property
    def namespace(self) -> str:
        """Namespace of the PDDeployment and of every child."""
        return str(self.metadata.get("namespace", ""))

    @property
    def uid(self) -> str:
        """The uid that children carry in their owner reference."""
        return str(self.metadata.get("uid", ""))

    @property
    def generation(self) -> int:
        """`metadata.generation` of the spec that was read."""
        return int(self.metadata.get("generation", 0))

    def mine(self) -> tuple[Child, ...]:
        """The children whose controller is this very object, in a fixed order."""
        return tuple(child for _, child in sorted(self.children.items()) if child.belongs_to(self.uid))


def observe_child(kind: str, raw: Mapping[str, Any]) -> Child:
    """Cut an object from the API down to what decisions need."""
    metadata = _mapping(raw.get("metadata"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    return Child(
        ref=Ref(kind, str(metadata.get("namespace", "")), str(metadata.get("name", ""))),
        uid=str(metadata.get("uid", "")),
        version=resource_version(raw),
        created=str(metadata.get("creationTimestamp") or ""),
        deployment=str(labels.get(names.LABEL_DEPLOYMENT, "")),
        role=str(labels.get(names.LABEL_ROLE, "")),
        managed=labels.get(MANAGED_BY_LABEL) == MANAGED_BY,
        owner=_controller(metadata),
        rendered_hash=str(annotations.get(HASH_ANNOTATION, "")),
        operator=str(annotations.get(OPERATOR_ANNOTATION, "")),
        owned_fields=_owned_fields(metadata),
        repaired=any(entry.get("manager") == REPAIR_MANAGER for entry in metadata.get("managedFields") or ()),
        deleting="deletionTimestamp" in metadata,
        workload=_workload(kind, raw) if kind in IMMUTABLE else None,
    )


def resource_version(raw: Mapping[str, Any]) -> int:
    """resourceVersion as a number, 0 when there is none: servers count upwards, so larger is newer."""
    text = str(_mapping(raw.get("metadata")).get("resourceVersion", ""))
    return int(text) if text.isdigit() else 0


def immutable_fields(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a workload's spec that can't be changed, as far as they are set."""
    spec = _mapping(raw.get("spec"))
    return {name: spec[name] for name in IMMUTABLE.get(kind, ()) if spec.get(name) not in (None, [], "")}


def _controller(metadata: Mapping[str, Any]) -> tuple[str, str, str]:
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner.get("kind", "")), str(owner.get("name", "")), str(owner.get("uid", ""))
    return "", "", ""


def _owned_fields(metadata: Mapping[str, Any]) -> str:
    for entry in metadata.get("managedFields") or ():
        ours = entry.get("manager") == MANAGER and entry.get("operation") == "Apply"
        if ours and not entry.get("subresource"):
            return json.dumps(entry.get("fieldsV1") or {}, sort_keys=True, separators=(",", ":"))
    return ""


def _workload(kind: str, raw: Mapping[str, Any]) -> Workload:
    metadata, spec, status = (_mapping(raw.get(part)) for part in ("metadata", "spec", "status"))
    return Workload(
        begun=int(status.get("observedGeneration", 0)) > 0,
        current=int(status.get("observedGeneration", 0)) >= int(metadata.get("generation", 0)),
        wanted=int(spec.get("replicas", 1)),
        replicas=int(status.get("replicas", 0)),
        ready=int(status.get("readyReplicas", 0)),
        updated=int(status.get("updatedReplicas", 0)),
        available=int(status.get("availableReplicas", 0)),
        partition=int(_at(spec, "updateStrategy", "rollingUpdate").get("partition", 0)),
        generation=str(_at(spec, "template", "metadata", "labels").get(names.LABEL_GENERATION, "")),
        account=str(_at(spec, "template", "metadata", "annotations").get(ACCOUNT_ANNOTATION, "")),
        current_revision=str(status.get("currentRevision", "")),
        update_revision=str(status.get("updateRevision", "")),
        paused=bool(spec.get("paused")),
        deadline_passed=any(
            condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded"
            for condition in status.get("conditions") or ()
        ),
        pods_refused=next(
            (
                one_line(condition.get("message"))
                for condition in status.get("conditions") or ()
                if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True"
            ),
            "",
        ),
        immutable=json.dumps(immutable_fields(kind, raw), sort_keys=True),
    )


def _at(value: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    for part in path:
        value = _mapping(value.get(part))
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
