"""Which kinds of objects a PDDeployment has as children, and where an API server keeps them.

One table, because four places must agree on it: what is watched, what is listed, what may be deleted, and what the
chart's role allows. A kind that is rendered but missing here is an error, never a silent gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pd_wire import names


@dataclass(frozen=True, slots=True)
class Kind:
    """One namespaced resource. `group` is empty for the core group."""

    name: str
    group: str
    version: str
    plural: str

    @property
    def api_version(self) -> str:
        """As in a manifest: `apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path prefix of the group in the API."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """The address of one object."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


DEPLOYMENTS: Final = Kind(names.KIND, names.API_GROUP, names.API_VERSION, "pddeployments")
PODS: Final = Kind("Pod", "", "v1", "pods")
EVENTS: Final = Kind("Event", "", "v1", "events")

CHILD_KINDS: Final = (
    Kind("ServiceAccount", "", "v1", "serviceaccounts"),
    Kind("Role", "rbac.authorization.k8s.io", "v1", "roles"),
    Kind("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings"),
    Kind("Service", "", "v1", "services"),
    Kind("StatefulSet", "apps", "v1", "statefulsets"),
    Kind("Deployment", "apps", "v1", "deployments"),
    Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
)

_BY_NAME: Final = {kind.name: kind for kind in (DEPLOYMENTS, PODS, EVENTS, *CHILD_KINDS)}


def kind_named(name: str) -> Kind:
    """The kind called `StatefulSet`, ….

    Raises:
        KeyError: for a kind that the operator knows nothing about.
    """
    return _BY_NAME[name]
