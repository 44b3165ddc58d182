"""Which of the listed namespaces can't be served now, since they are gone or forbidden, and telling when that changes.

One that is lost costs the others nothing. Its rights lie in the namespace itself, so one that is deleted and made again
stays forbidden until somebody grants them anew; it is tried again and again, and served as soon as it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pd_operator.shell.api import ApiError
from pd_operator.shell.metrics import Metrics

logger = logging.getLogger(__name__)


class LostNamespaces:
    """Namespaces by name, with the server's words."""

    def __init__(self, namespaces: Iterable[str], metrics: Metrics) -> None:
        self._metrics = metrics
        self._lost: dict[str, str] = {}
        for namespace in namespaces:
            metrics.namespace_served.labels(namespace).set(1)

    @property
    def names(self) -> Mapping[str, str]:
        """Those that are lost now, and why."""
        return self._lost

    def lose(self, namespace: str, error: ApiError) -> None:
        """It has answered that it is forbidden."""
        if namespace not in self._lost:
            logger.error("the namespace %s is not served, it is gone or forbidden: %s", namespace, error)
        self._lost[namespace] = str(error)
        self._metrics.namespace_served.labels(namespace).set(0)

    def find(self, namespace: str) -> bool:
        """It has answered. Was it lost until now?"""
        if self._lost.pop(namespace, None) is None:
            return False
        logger.warning("the namespace %s is served again", namespace)
        self._metrics.namespace_served.labels(namespace).set(1)
        return True
