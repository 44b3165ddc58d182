"""Which other children a child uses, as far as rights go: accounts and roles.

Separate because it knows the shape of the kinds, and `plan` does not. A Service that a StatefulSet names is left out:
a foreign one gives nobody anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pd_operator.core.observed_kinds import Ref
from pd_operator.core.plan_accounts import account_of


def needs(manifest: Mapping[str, Any]) -> frozenset[Ref]:
    """The ServiceAccounts and Roles that a rendered child names. They may be no children at all."""
    return frozenset(_needs(manifest))


def _needs(manifest: Mapping[str, Any]) -> Iterator[Ref]:
    namespace = str(manifest["metadata"]["namespace"])
    if manifest["kind"] == "RoleBinding":
        for subject in manifest.get("subjects") or ():
            yield Ref(subject["kind"], subject.get("namespace", namespace), subject["name"])
        role = manifest.get("roleRef") or {}
        if role:
            yield Ref(role["kind"], namespace, role["name"])
    account = account_of(manifest)
    if account is not None:
        yield account
