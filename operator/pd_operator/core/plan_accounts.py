"""Pods and the ServiceAccount that they run as: when a workload waits for it, and when a new account rolls its pods.

A pod's token names its account by uid. When an account is deleted and made anew, the tokens of running pods are refused
from then on, and a kubelet gives them no other for most of an hour. New pods get tokens of the new account, so a
template that names the account's uid rolls them once.

The uid is written only where an account is younger than the workload. In the order in which children are applied the
account comes first, so a pod of any earlier account needs a younger one. Both times are the API server's and never
change: the answer is the same in every pass, and an upgrade of the operator rolls nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pd_operator.core.observed import Observed
from pd_operator.core.observed_kinds import Ref
from pd_wire import names

ACCOUNT_ANNOTATION: Final = f"{names.API_GROUP}/service-account-uid"

Manifest = Mapping[str, Any]


def account_of(manifest: Manifest) -> Ref | None:
    """The ServiceAccount that a workload's template names, None without one."""
    name = ((manifest.get("spec") or {}).get("template") or {}).get("spec", {}).get("serviceAccountName")
    return Ref("ServiceAccount", str(manifest["metadata"]["namespace"]), name) if name else None


def for_its_account(manifest: Manifest, ref: Ref, observed: Observed) -> Manifest:
    """The manifest, with the account's uid on its template when pods of an earlier account may run.

    Args:
        manifest: any rendered child.
        ref: its address.
        observed: what was seen of it and of its account.
    """
    account = account_of(manifest)
    found, workload = observed.children.get(account) if account else None, observed.children.get(ref)
    if found is None or workload is None or found.created <= workload.created:
        return manifest
    template = manifest["spec"]["template"]
    metadata = template.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), ACCOUNT_ANNOTATION: found.uid}
    template = {**template, "metadata": {**metadata, "annotations": annotations}}
    return {**manifest, "spec": {**manifest["spec"], "template": template}}
