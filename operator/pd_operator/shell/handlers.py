"""kopf's part: it watches, and each event only updates the mirror and wakes a reconcile.

Event handlers alone are used, for PDDeployments too. Handlers of kind create, update or resume would keep their
progress and a copy of the spec in annotations of the object, two writes for each change, and add nothing: the reconcile
compares everything itself. So kopf writes nothing at all: no annotation, no finalizer, no Event.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import kopf

from pd_operator.core.names import MANAGED_BY
from pd_operator.core.observed import MANAGED_BY_LABEL
from pd_operator.core.observed_kinds import CHILD_KINDS, DEPLOYMENTS, PODS, Kind
from pd_operator.shell.login import connection_info
from pd_wire import names

POD_SELECTOR: Final = names.LABEL_DEPLOYMENT
CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY},{names.LABEL_DEPLOYMENT}"

LONGEST_PAUSE: Final = 30.0
"""Seconds between two tries of a watch that is refused or gets no answer."""

Seen = Callable[[Kind, Mapping[str, Any], bool], None]


def selector_of(kind: Kind) -> str:
    """Label selector by which the server filters lists and watches of a kind."""
    if kind is DEPLOYMENTS:
        return ""
    return POD_SELECTOR if kind is PODS else CHILD_SELECTOR


def watched_kinds() -> tuple[Kind, ...]:
    """Everything that is watched, PDDeployments first."""
    return (DEPLOYMENTS, *CHILD_KINDS, PODS)


def make_registry(seen: Seen) -> kopf.OperatorRegistry:
    """Handlers for every kind; `seen` gets the kind, the raw object, and whether it is gone."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry, id="login")(connection_info)
    for kind in watched_kinds():
        _watch(registry, kind, seen)
    return registry


def make_settings(request_timeout: float) -> kopf.OperatorSettings:
    """kopf's settings for all of this."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = request_timeout
    settings.networking.trust_env = False
    settings.networking.error_backoffs = _Pauses()
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.queueing.idle_timeout = 1.0
    for kind in watched_kinds():
        if selector_of(kind):
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector_of(kind)
    # Never written today; set so that a handler which keeps state would not use foreign names on users' objects.
    prefix = names.API_GROUP
    settings.persistence.finalizer = f"{prefix}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=prefix)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=prefix, key="last-handled")
    return settings


class _Pauses:
    """Pauses between the tries of one call, without an end: to kopf a watch that gave up is the end of all others, and
    a namespace that is gone refuses for as long as it stays away."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0), itertools.repeat(LONGEST_PAUSE))


def _watch(registry: kopf.OperatorRegistry, kind: Kind, seen: Seen) -> None:
    async def on_event(event: kopf.RawEvent, **_: Any) -> None:
        seen(kind, event["object"], event["type"] == "DELETED")

    kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"saw-{kind.plural}")(on_event)
