"""Posting Events. Best effort: a failure is logged and nothing waits for it, since conditions are the truth."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pd_operator.core.observed import MANAGER, Observed
from pd_operator.core.observed_kinds import DEPLOYMENTS
from pd_operator.core.status_events import Happening
from pd_operator.shell.api import ApiError, ClusterApi

logger = logging.getLogger(__name__)


async def post_events(api: ClusterApi, about: Observed, news: Iterable[Happening], now: str) -> None:
    """Tell what changed. `now` is an RFC 3339 time."""
    for happening in news:
        try:
            await api.create_event(about.namespace, event_body(about, happening, now))
        except ApiError as error:
            if error.namespace_is_going:
                return  # with everything in it, news included
            logger.info("event %s of %s/%s is lost: %s", happening.reason, about.namespace, about.name, error)
            return


def event_body(about: Observed, happening: Happening, now: str) -> dict[str, Any]:
    """A core/v1 Event; the server completes the name."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{about.name}.", "namespace": about.namespace},
        "involvedObject": {
            "apiVersion": DEPLOYMENTS.api_version,
            "kind": DEPLOYMENTS.name,
            "name": about.name,
            "namespace": about.namespace,
            "uid": about.uid,
            "resourceVersion": str(about.metadata.get("resourceVersion", "")),
        },
        "type": happening.kind,
        "reason": happening.reason,
        "message": happening.message,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": MANAGER,
    }
