"""An API server's words about a child → the same words with the fields of the PDDeployment that its paths come from.

A server names paths in the StatefulSet that it refuses, which its user has never seen. Where a path comes from one
field the field stands in its place; what has no field (an admission policy's own words, what is always the same) stays
as the server has said it. Indices of lists are left out, since a list of the child holds more than the user's entries.
"""

from __future__ import annotations

import re
from typing import Final

from pd_operator.core.names import ROUTER

_BEGINS: Final = r"(?<![\w.])"
_POD: Final = rf"{_BEGINS}spec\.template\.spec\."
_REST: Final = r"(?:\[[^\]]*\]|\.\w+)*"
"""The rest of a path that has no counterpart in the field."""

_CONTAINER: Final = rf"{_POD}(?:containers\[0\]|initContainers\[1\])\."
"""An engine's container and its self-test, which is made after it; a router's only one."""

_EVERY_PART: Final = (
    (rf"{_CONTAINER}resources", "spec.PART.resources"),
    (rf"{_POD}tolerations{_REST}", "spec.PART.pod.tolerations"),
    (rf"{_POD}affinity\.nodeAffinity{_REST}", "spec.PART.pod.nodeMatchExpressions"),
    (rf"{_POD}(nodeSelector|priorityClassName|runtimeClassName|schedulerName)", r"spec.PART.pod.\1"),
    (rf"{_POD}imagePullSecrets{_REST}", "spec.imagePullSecrets"),
    (rf"{_BEGINS}spec\.template\.metadata\.(labels|annotations)", r"spec.PART.pod.\1"),
    (rf"{_BEGINS}spec\.replicas\b", "spec.PART.replicas"),
)
_ENGINES: Final = (
    (rf"{_CONTAINER}image\b", "spec.engine.image"),
    (rf"{_CONTAINER}env{_REST}", "spec.engine.env or spec.PART.env"),
    (rf"{_CONTAINER}lifecycle{_REST}", "spec.engine.preStopSeconds"),
    (rf"{_CONTAINER}volumeMounts{_REST}", "spec.engine.volumes or spec.model.source"),
    (rf"{_POD}volumes{_REST}", "spec.engine.volumes or spec.model.source"),
    (rf"(?:{_CONTAINER}|{_POD})securityContext{_REST}", "spec.engine.securityProfile"),
    (rf"{_POD}hostNetwork\b", "spec.engine.hostNetwork"),
    (rf"{_POD}terminationGracePeriodSeconds\b", "spec.engine.shutdownTimeoutSeconds"),
    (rf"{_POD}serviceAccountName\b", "spec.PART.pod.serviceAccountName"),
    (rf"{_POD}resourceClaims{_REST}", "spec.PART.pod.resourceClaims"),
    (rf"{_BEGINS}spec\.updateStrategy\.rollingUpdate", "spec.PART.updateStrategy"),
    (rf"{_BEGINS}spec\.minReadySeconds\b", "spec.PART.minReadySeconds"),
)
_ROUTERS: Final = (
    (rf"{_CONTAINER}image\b", "spec.router.image"),
    (rf"{_POD}terminationGracePeriodSeconds\b", "spec.router.timeouts.drainSeconds"),
)
_SERVICES: Final = (
    (rf"{_BEGINS}spec\.ports\[0\]\.port\b", "spec.router.service.port"),
    (rf"{_BEGINS}spec\.(type|sessionAffinity)\b", r"spec.router.service.\1"),
    (rf"{_BEGINS}metadata\.annotations", "spec.router.service.annotations"),
)


def in_fields(kind: str, part: str, message: str) -> str:
    """The message with fields in place of a child's paths.

    Args:
        kind: of the child.
        part: `prefill`, `decode` or `router`; any other text leaves the message as it is.
        message: the server's words.
    """
    for path, field in _table(kind, part):
        message = re.sub(path, field.replace("PART", part), message)
    return message


def _table(kind: str, part: str) -> tuple[tuple[str, str], ...]:
    if kind == "StatefulSet":
        return (*_EVERY_PART, *_ENGINES)
    if part != ROUTER:
        return ()
    return {"Deployment": (*_EVERY_PART, *_ROUTERS), "Service": _SERVICES}.get(kind, ())
