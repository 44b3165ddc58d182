"""The few things that the operator does to a Kubernetes API, as a port, and how they fail.

Separate from the client so that reconciles are tested against a cluster in memory and under injected faults, and so
that the list of verbs that the chart's role must allow can be read in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pd_operator.core.observed_kinds import Kind, Ref


class ApiError(Exception):
    """A call that did not succeed.

    Attributes:
        status: HTTP status, 0 when there was no answer at all.
        reason: the server's word, such as `Conflict`.
        retry_after: seconds that the server asked us to wait, or None.
        causes: the server's machine-readable causes, such as `NamespaceTerminating`.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: float | None = None,
        causes: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"{status} {reason}: {message}" if status else message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.causes = causes

    @property
    def transient(self) -> bool:
        """Does waiting help? Otherwise the server has refused this very content and a person must know."""
        return self.status in (0, 408, 409, 425, 429, 502, 503, 504)

    @property
    def namespace_is_going(self) -> bool:
        """Was something created in a namespace that is being deleted?"""
        return "NamespaceTerminating" in self.causes


class ClusterApi(Protocol):
    """Verbs on single objects. Every method raises ApiError."""

    async def get(self, ref: Ref) -> Mapping[str, Any] | None:
        """The object, None when there is none."""

    async def alive(self, ref: Ref, uid: str) -> bool:
        """Does that very object exist, now? Asked of the server, not of what was seen."""

    async def list(self, kind: Kind, namespace: str | None, label_selector: str) -> tuple[list[Mapping[str, Any]], int]:
        """All objects in one namespace (None: in the cluster), and the list's resourceVersion as a number."""

    async def apply(self, manifest: Mapping[str, Any], uid: str | None) -> Mapping[str, Any]:
        """Server-side apply. With a uid only that object is changed; without one, nothing that others own."""

    async def rehearse(self, manifest: Mapping[str, Any], uid: str | None) -> None:
        """The same as `apply` without any effect: does the server take it?"""

    async def hand_over(self, manifest: Mapping[str, Any], uid: str) -> None:
        """Make another field manager own the fields of a manifest, at the value that they have."""

    async def patch(self, ref: Ref, version: str, operations: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """JSON patch of the object at that very resourceVersion, as the manager of repairs."""

    async def apply_status(self, ref: Ref, uid: str, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """Server-side apply of the status subresource of a PDDeployment."""

    async def delete(self, ref: Ref, uid: str, *, orphan: bool) -> bool:
        """Delete that very object. False when it was gone already."""

    async def events_about(self, namespace: str, uid: str) -> Sequence[Mapping[str, Any]]:
        """The Events about one object."""

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Post an Event."""
