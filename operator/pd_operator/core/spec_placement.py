"""`spec.topology` and `spec.networkPolicy`: where pods of the roles may run, and who may talk to them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pd_operator.core import fields
from pd_operator.core.choices import Hosts, Switch, Zone
from pd_operator.core.fields import SpecModel

NamespaceName = Annotated[str, Field(min_length=1, max_length=63, pattern=fields.NAMESPACE)]


class Topology(SpecModel):
    """Where prefill and decode engines run in relation to each other."""

    zone: Zone | None = Field(
        default=None,
        description="Same: all engines in one availability zone, since EFA does not cross zones; nodes then need the "
        "label topology.kubernetes.io/zone. Any: no condition. Absent: Same with backend LIBFABRIC, otherwise Any.",
    )
    hosts: Hosts | None = Field(
        default=None,
        description="Separate: no prefill engine on the host of a decode engine, since EFA has no path inside a host. "
        "Any: no condition. Absent: Separate with backend LIBFABRIC, otherwise Any.",
    )


class NetworkPolicies(SpecModel):
    """Who may open connections to the pods."""

    mode: Switch = Field(
        default=Switch.ENABLED,
        description="Enabled: engines accept their own router and each other, the router's admin port accepts the "
        "operator. Needs a network plugin that enforces policies; without one nothing changes. EFA traffic is not "
        "filtered by them but by security groups.",
    )
    monitoring_namespaces: Annotated[tuple[NamespaceName, ...], Field(max_length=16)] = Field(
        default=(),
        description="Namespaces whose pods may read metrics of engines and routers.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
