"""What the objects of a cluster say about one PDDeployment: is it ready as wanted, what is it waiting for, where is it?

Separate from the demo that asks, because these are pure readings of `kubectl … -o json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_wire import names

ENGINE_PORT: Final = 8000
ROUTER_ADMIN_PORT: Final = 9000


@dataclass(frozen=True, slots=True)
class Sight:
    """One look.

    ``ready``: this very spec is served by its pods; ``waiting_for``: a sentence; ``deaths``: pods that lost a
    container, each with what is known.
    """

    ready: bool
    waiting_for: str
    deaths: tuple[str, ...]


def read_sight(pdd: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Sight:
    """Judge a PDDeployment object and the pods that are labelled as its own."""
    status = pdd.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions", ())}
    current = status.get("observedGeneration") == pdd["metadata"]["generation"]
    leaving = [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]
    deaths = tuple(death for pod in pods for death in _deaths(pod))
    if not current:
        return Sight(False, "the operator", deaths)
    for name in ("Ready", "BidirectionalActive"):
        condition = conditions.get(name, {})
        wanted = name == "Ready" or pdd["spec"]["kvTransfer"]["bidirectional"] == "Enabled"
        if (condition.get("status") == "True") is not wanted:
            text = condition.get("message") or condition.get("reason") or f"condition {name}"
            return Sight(False, text.removeprefix("waiting for "), deaths)
    if conditions.get("Progressing", {}).get("status") == "True":
        return Sight(False, conditions["Progressing"].get("message", "the rollout"), deaths)
    if leaving:
        return Sight(False, f"{', '.join(sorted(leaving))} to end", deaths)
    return Sight(True, "", deaths)


def pods_of(pods: Sequence[Mapping[str, Any]], role: str) -> list[Mapping[str, Any]]:
    """Pods of one role that are not leaving, by name."""
    found = [
        pod
        for pod in pods
        if pod["metadata"].get("labels", {}).get(names.LABEL_ROLE) == role
        and "deletionTimestamp" not in pod["metadata"]
        and pod.get("status", {}).get("podIP")
    ]
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


def _deaths(pod: Mapping[str, Any]) -> list[str]:
    found = []
    for container in pod.get("status", {}).get("containerStatuses", ()):
        if container.get("restartCount", 0) > 0:
            last = (container.get("lastState") or {}).get("terminated") or {}
            reason = last.get("message") or last.get("reason") or "no reason given"
            name = pod["metadata"]["name"]
            found.append(f"{name}: container {container['name']} ended ({str(reason).strip()[-600:]})")
    return found
