"""What one request that passes leaves behind for people: its metrics and its line in the log.

Separate from `record`, which follows a turn through two legs and the reuse funnel. The counters are the same, with the
path in the place of the API; `/debug/explain` has turns only, whose decisions are worth a look.
"""

from __future__ import annotations

from typing import Any

from pd_router.shell.context import Context
from pd_router.shell.exchange import Failure
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed
from pd_router.shell.logs import log_turn


class PassedRecord:
    """Facts of one request, gathered as it goes."""

    def __init__(self, context: Context, request_id: str, path: str, arrived: float) -> None:
        """`arrived`: on the context's clock."""
        self._context = context
        self._metrics = context.metrics
        self._arrived = arrived
        self._asked: Member | None = None
        self._fields: dict[str, Any] = {"request_id": request_id, "api": path, "attempts": 0, "retries": []}

    @property
    def attempts(self) -> int:
        """How often an engine was asked."""
        attempts: int = self._fields["attempts"]
        return attempts

    def began(self, engine: Member) -> None:
        """An engine is about to be asked."""
        self._asked = engine
        self._metrics.legs[engine.role] += 1
        self._fields["attempts"] += 1
        self._fields[engine.role] = engine.key

    def _over(self, result: str) -> None:
        if self._asked is not None:
            engine, self._asked = self._asked, None
            self._metrics.legs[engine.role] -= 1
            self._metrics.leg_ended(engine.role, engine.key, result)

    def ended(self, status: int) -> None:
        """The engine's answer is over; the status is the client's."""
        self._over({200: "ok", 502: "failed"}.get(status, "abandoned"))

    def failed(self, failure: LegFailed) -> None:
        """The engine gave no answer that could be relayed."""
        given_up = failure.reason == Failure.ABORTED.value
        role = self._asked.role if self._asked is not None else failure.leg
        self._over("failed" if failure.engine_fault else "abandoned" if given_up else "refused")
        self._metrics.leg_failures[role, failure.reason].inc()
        if failure.status is not None:
            self._fields["engine_status"] = failure.status

    def retried(self, failure: LegFailed) -> None:
        """Another engine is asked."""
        self._metrics.retries[failure.leg, failure.reason].inc()
        self._fields["retries"].append(f"{failure.leg}: {failure.reason}")

    def client_left(self, stage: str) -> None:
        """The client is gone."""
        self._metrics.disconnects[stage].inc()
        self._fields["client_left"] = stage

    def finish(self, status: int) -> None:
        """It is over."""
        self._over("abandoned")
        self._metrics.requests[self._fields["api"], str(status)].inc()
        self._fields["status"] = status
        self._fields["total_ms"] = round((self._context.now() - self._arrived) * 1e3, 2)
        log_turn(self._fields)
