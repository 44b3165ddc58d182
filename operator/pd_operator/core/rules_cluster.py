"""What one machine can do and a cluster cannot: found when children are rendered, not when an object is read."""

from __future__ import annotations

from collections.abc import Iterator

from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem


def check(deployment: PDDeployment) -> list[Problem]:
    """Every reason why there can be no pods for this deployment."""
    return [problem for rule in RULES for problem in rule(deployment)]


def image(deployment: PDDeployment) -> Iterator[Problem]:
    """Pods need an image; the vLLM of this machine is no help to them."""
    if deployment.spec.engine.image is None:
        yield Problem(
            "spec.engine.image", "is required in a cluster: a container image with vLLM and NIXL, for both roles"
        )


RULES = (image,)
