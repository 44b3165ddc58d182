"""How many pods a workload starts with that is made anew while an autoscaler decides about their number.

What is rendered says nothing about replicas then, and a server would fill in 1: a StatefulSet that was deleted without
its pods, or replaced, would come back, adopt all of them and end all but one. So it is created with the number of the
pods that it finds. It is sent in that one apply; it is no part of the wish, so no later pass asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pd_operator.core.observed import Observed
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.reasons import Reason

_DEFAULT: Final = 1
"""What a server fills in."""


def with_living_replicas(manifest: Mapping[str, Any], ref: Ref, observed: Observed) -> Mapping[str, Any]:
    """The manifest to create a child from; replicas are added to a workload that names none and has pods."""
    living = living_replicas(ref, observed)
    if living <= _DEFAULT or "replicas" in (manifest.get("spec") or {}):
        return manifest
    return {**manifest, "spec": {**manifest["spec"], "replicas": living}}


def living_replicas(ref: Ref, observed: Observed) -> int:
    """The replicas with which a workload keeps every pod of its name that is not ending; 0 for other kinds.

    A StatefulSet keeps the smallest indices, so the highest one counts. A Deployment replaces pods that have failed and
    leaves them where they are, so those don't count.
    """
    prefix = f"{ref.name}-"
    pods = [pod for pod in observed.pods if pod.name.startswith(prefix) and not pod.deleting]
    if ref.kind == "StatefulSet":
        rests = (pod.name.removeprefix(prefix) for pod in pods)
        return max((int(rest) + 1 for rest in rests if rest.isdecimal() and rest.isascii()), default=0)
    if ref.kind == "Deployment":
        return sum(pod.trouble is None or pod.trouble.reason is not Reason.POD_FAILED for pod in pods)
    return 0
