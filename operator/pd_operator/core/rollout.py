"""What was seen → the sides of `plan_rollout`; its holds → manifests.

Separate so that the decision itself stays plain arithmetic over engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_operator.core.choices import Role, UpdateStrategyType
from pd_operator.core.observed import Observed
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import Pod
from pd_operator.core.plan_rollout import Engine, Hold, Rollout, Side, pairs, plan_rollout
from pd_wire import names

STATEFULSET: Final = "StatefulSet"

Manifest = Mapping[str, Any]


def held_back(generation: str, manifests: Sequence[Manifest], observed: Observed) -> tuple[Manifest, ...]:
    """The manifests with what the rollout keeps back for now.

    Args:
        generation: the one that the manifests carry.
        manifests: the rendered children, both StatefulSets among them.
        observed: what was seen of them.
    """
    holds = dict(zip(Role, _decide(generation, manifests, observed).holds, strict=True))
    return tuple(_with_hold(one, holds[Role(_role(one))]) if one["kind"] == STATEFULSET else one for one in manifests)


def held_texts(generation: str, manifests: Sequence[Manifest], observed: Observed) -> dict[str, str]:
    """What each role keeps back, for people; a role that keeps nothing is left out."""
    rollout = _decide(generation, manifests, observed)
    texts: dict[str, str] = {}
    for role, other, hold in zip(Role, reversed(Role), rollout.holds, strict=True):
        if hold.replicas is not None:
            texts[role.value] = f"{hold.replicas} stay until those that are wanted make a pair"
        elif hold.kept and rollout.gap and hold.kept == len(_engines(observed, role)):
            texts[role.value] = f"kept until {other.value} has a new one; then requests get a 503 for one start"
        elif hold.kept:
            texts[role.value] = f"{hold.kept} of an earlier generation kept until {other.value} has more new ones"
    return texts


def paired(observed: Observed) -> bool:
    """Do both roles have a ready engine of one generation? True while no ready pod of a role is known."""
    sides = [_engines(observed, role) for role in Role]
    return bool(pairs(sides)) or not all(any(engine.ready for engine in engines) for engines in sides)


def _decide(generation: str, manifests: Sequence[Manifest], observed: Observed) -> Rollout:
    wanted = {_role(one): one for one in manifests if one["kind"] == STATEFULSET}
    prefill, decode = (_side(wanted[role], observed, role) for role in Role)
    return plan_rollout(generation, (prefill, decode))


def _side(manifest: Manifest, observed: Observed, role: Role) -> Side:
    spec = manifest["spec"]
    rolling = spec["updateStrategy"].get("rollingUpdate", {})
    metadata = manifest["metadata"]
    child = observed.children.get(Ref(STATEFULSET, metadata["namespace"], metadata["name"]))
    live = child.workload if child is not None and child.belongs_to(observed.uid) else None
    return Side(
        replicas=live.wanted if live else int(spec.get("replicas", 1)),
        engines=_engines(observed, role),
        available=live.available if live else 0,
        wanted=spec.get("replicas"),
        generation=live.generation if live else "",
        partition=live.partition if live else 0,
        user_partition=int(rolling.get("partition", 0)),
        step=int(rolling.get("maxUnavailable", 1)),
    )


def _engines(observed: Observed, role: Role) -> tuple[Engine, ...]:
    pods = (pod for pod in observed.pods if pod.role == role.value and not pod.deleting)
    return tuple(Engine(_index(pod), pod.generation, pod.ready, pod.trouble is not None) for pod in pods)


def _index(pod: Pod) -> int:
    number = pod.name.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def _with_hold(manifest: Manifest, hold: Hold) -> Manifest:
    spec = manifest["spec"]
    if hold.replicas is not None and "replicas" in spec:
        spec = {**spec, "replicas": hold.replicas}
    strategy = spec["updateStrategy"]
    rolling = strategy.get("rollingUpdate", {})
    if strategy["type"] == UpdateStrategyType.ROLLING_UPDATE and hold.partition != rolling.get("partition", 0):
        spec = {**spec, "updateStrategy": {**strategy, "rollingUpdate": {**rolling, "partition": hold.partition}}}
    return {**manifest, "spec": spec}


def _role(manifest: Manifest) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(names.LABEL_ROLE, ""))
