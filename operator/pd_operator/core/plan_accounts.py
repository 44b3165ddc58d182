"""Pods and the ServiceAccount that they run as: when a workload waits for it, and when a new account rolls its pods.

A pod's token names its account by uid. When an account is deleted and made anew, the tokens of running pods are refused
from then on, and a kubelet gives them no other for most of an hour. New pods get tokens of the new account, so a
template that names the account's uid rolls them once.

The uid is written only where an account is younger than the workload. In the order in which children are applied the
account comes first, so a pod of any earlier account needs a younger one. Both times are the API server's and never
change: the answer is the same in every pass, and an upgrade of the operator rolls nothing.

A workload that is made anew over living pods (it was deleted without them) is younger than any account, so its pods
tell: the uid is written when one of them is older than the account, or names it already. From then on the workload's
own template keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_operator.core.observed import Child, Observed
from pd_operator.core.observed_kinds import Ref
from pd_operator.core.observed_pods import ACCOUNT_ANNOTATION, Pod

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
        observed: what was seen of it, of its account and of its pods.
    """
    account = account_of(manifest)
    found = observed.children.get(account) if account else None
    if found is None or not _needs_its_uid(found, ref, observed):
        return manifest
    template = manifest["spec"]["template"]
    metadata = template.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), ACCOUNT_ANNOTATION: found.uid}
    template = {**template, "metadata": {**metadata, "annotations": annotations}}
    return {**manifest, "spec": {**manifest["spec"], "template": template}}


def has_living_pods(ref: Ref, observed: Observed) -> bool:
    """Are there pods of a workload, so that it would adopt them when it is made anew?"""
    return bool(_living(ref, observed))


def _needs_its_uid(account: Child, ref: Ref, observed: Observed) -> bool:
    child = observed.children.get(ref)
    if child is None:
        return any(_is_older(pod, account) or pod.account == account.uid for pod in _living(ref, observed))
    named = child.workload.account if child.workload else ""
    return child.created < account.created or named == account.uid


def _living(ref: Ref, observed: Observed) -> list[Pod]:
    return [pod for pod in observed.pods if pod.name.startswith(f"{ref.name}-") and not (pod.deleting or pod.finished)]


def _is_older(pod: Pod, account: Child) -> bool:
    return "" < pod.created < account.created
