"""What one turn leaves behind for people: its line in `/debug/explain` and its metrics.

Separate from the turn so that the control flow there is not interleaved with counting. Nothing here changes what
happens to a turn, and nothing secret goes in: no handle, no prompt, no key.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pd_router.core.plan import Plan
from pd_router.core.policy import Decision, Drop
from pd_router.core.sse import Ending
from pd_router.core.usage import reused_tokens
from pd_router.shell.context import Context
from pd_router.shell.exchange import Failure
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed, Prefilled
from pd_router.shell.logs import current, log_turn
from pd_router.shell.request_reader import Request

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class TurnRecord:
    """Facts of one turn, gathered as it goes. `fields` is what `/debug/explain` shows."""

    __slots__ = ("_accepted_at", "_context", "_leg", "_metrics", "_planned", "_trace", "arrived", "fields")

    def __init__(self, context: Context, request_id: str, api: str, request: Request) -> None:
        self._context = context
        self._metrics = context.metrics
        self.arrived = request.arrived
        self._planned: tuple[str, ...] = ()
        self._leg: tuple[str, str] | None = None
        self._accepted_at = 0.0
        tracing = context.tracing
        self._trace = None if tracing is None else tracing.turn(api, request.path, request.headers, request.arrived)
        if self._trace is not None:
            current.set((request_id, self._trace.trace_id))
        self.fields: dict[str, Any] = {
            "request_id": request_id,
            "api": api,
            "attempts": 0,
            "retries": [],
            "attached": False,
        }

    def admitted(self) -> None:
        """The turn may begin."""
        waited = self._context.now() - self.arrived
        self._metrics.queue_seconds.observe(waited)
        self.fields["queue_ms"] = round(waited * 1e3, 2)
        if self._trace is not None:
            self._trace.queued(self.arrived)

    def began(self, leg: str, engine: Member, headers: Mapping[str, str]) -> Mapping[str, str]:
        """A leg is about to be sent to an engine. Returns the headers for it: the client's, in the turn's trace."""
        self._leg_over("abandoned")
        self._leg = (leg, engine.key)
        self._metrics.legs[leg] += 1
        return headers if self._trace is None else self._trace.began(leg, engine.key, engine.address, headers)

    def accepted(self) -> None:
        """The head of decode's answer is there."""
        self._accepted_at = self._context.now()

    def _leg_over(self, result: str, reason: str = "", facts: Mapping[str, Any] = NOTHING) -> None:
        """The running leg, if there is one, is over. `reason`: of a failure; `facts`: for its span."""
        if self._leg is not None:
            (leg, engine), self._leg = self._leg, None
            self._metrics.legs[leg] -= 1
            self._metrics.leg_ended(leg, engine, result)
            if self._trace is not None:
                self._trace.ended(result, reason, facts)

    def stage(self, name: str) -> None:
        """The turn reached a stage of the reuse funnel."""
        self._metrics.funnel[name].inc()

    def planned(self, planned: Plan, found: Decision) -> None:
        """Who serves this attempt. `found`: what was decided about the handle before engines were chosen."""
        for name in self._planned:
            del self.fields[name]
        shown = planned.explain()
        self._planned = tuple(shown)
        self.fields |= shown
        drop = planned.decision.drop
        if drop is not None and drop is not found.drop:
            self.dropped(drop)

    def dropped(self, drop: Drop) -> None:
        """The turn left the reuse funnel."""
        self._metrics.drops[drop.value].inc()
        self.fields["reason"] = drop.value

    def attached(self, linked_by: str) -> None:
        """A handle goes out with the prefill."""
        self.stage("attached")
        self._metrics.linked[linked_by].inc()
        self.fields["linked_by"] = linked_by
        self.fields["attached"] = True

    def prefilled(self, result: Prefilled, seconds: float, attached: bool) -> None:
        """The prefill leg is over."""
        self._leg_over("ok", facts=NOTHING if self._trace is None else _of_prefill(result))
        self._metrics.prefill_seconds.observe(seconds)
        self.fields["prefill_ms"] = round(seconds * 1e3, 2)
        self.fields["prompt_tokens"] = result.prompt_tokens
        report = result.report
        local, pulled = (None, None) if report is None else (report.local_tokens, report.pulled_tokens)
        reused = reused_tokens(result.cached_tokens, local, pulled)
        self.fields["cached_tokens"] = reused
        if result.prompt_tokens:
            self._metrics.prompt_tokens.inc(result.prompt_tokens)
        if reused:
            self._metrics.cached_tokens.inc(reused)
        if result.params is None:
            self.fields["handoff"] = "prefill offered no blocks"
        if not attached or report is None:
            return
        self.fields["verdict"] = report.verdict.value
        self.fields["proven_tokens"] = report.proven_tokens
        self.fields["pulled_tokens"] = report.pulled_tokens
        self.fields["local_tokens"] = report.local_tokens
        if report.proven_tokens > 0:
            self.stage("proven")
            self._metrics.proven.inc(report.proven_tokens)
        else:
            self.dropped(Drop.REFUSED_BY_PREFILL)
        if report.gone_tokens:
            self.fields["gone_tokens"] = report.gone_tokens
            self._metrics.gone.inc(report.gone_tokens)
        if report.wasted_tokens:
            self.fields["wasted_tokens"] = report.wasted_tokens
            self._metrics.wasted.inc(report.wasted_tokens)
        if report.pulled_tokens > 0:
            self.stage("pulled")
            self._metrics.pulled.inc(report.pulled_tokens)

    def first_content(self, prefilled_at: float) -> None:
        """The first content is about to be sent."""
        now = self._context.now()
        self.fields["ttft_ms"] = round((now - self.arrived) * 1e3, 2)
        if self._trace is not None:
            self._trace.first_content(now - self.arrived)
        if prefilled_at:
            self.fields["handoff_ms"] = round((self._accepted_at - prefilled_at) * 1e3, 2)
        self.fields["first_token_ms"] = round((now - self._accepted_at) * 1e3, 2)
        if not self.fields["stream"]:
            return  # its first content is its last
        self._metrics.ttft_seconds.observe(now - self.arrived)
        self._metrics.first_token_seconds.observe(now - self._accepted_at)
        if prefilled_at:
            self._metrics.handoff_seconds.observe(self._accepted_at - prefilled_at)

    def ended(self, ending: Ending) -> None:
        """Decode's answer is over."""
        result = "ok" if ending is Ending.CLEAN else "abandoned" if ending is Ending.ABORTED else "failed"
        self._leg_over(result, ending.value if result == "failed" else "")
        self._metrics.endings[ending.value].inc()
        self.fields["ending"] = ending.value

    def failed(self, failure: LegFailed, attached: bool) -> None:
        """A leg failed."""
        given_up = failure.reason == Failure.ABORTED.value
        self._leg_over("failed" if failure.engine_fault else "abandoned" if given_up else "refused", failure.reason)
        self._metrics.leg_failures[failure.leg, failure.reason].inc()
        if attached:
            self.fields["reason"] = f"{failure.leg}_{failure.reason}"
        if failure.status is not None:
            self.fields["engine_status"] = failure.status
        if attached and not failure.retryable:
            # D's blocks were spent on a turn that gave no answer and left no new handle.
            self.fields["handle_lost"] = failure.leg
            self._metrics.lost[failure.leg].inc()

    def retried(self, failure: LegFailed) -> None:
        """The turn starts again."""
        tried = {name: self.fields[name] for name in ("prefill", "decode") if name in self.fields}
        self.fields.setdefault("tried", []).append(tried | {"failed": failure.leg})
        self._metrics.retries[failure.leg, failure.reason].inc()
        self.fields["retries"].append(f"{failure.leg}: {failure.reason}")

    def not_retried(self) -> None:
        """The budget allows no retry of it."""
        self._metrics.retries_refused.inc()
        self.fields["not_retried"] = "the retry budget is used up"

    def stored(self, result: str) -> None:
        """D's handle is kept."""
        self._metrics.stored.inc()
        self.fields["stored"] = result

    def leased(self, seconds: int, right: str) -> None:
        """D promised to keep its blocks for so long. `right`: by which that is prolonged, "" for none."""
        self.fields["lease_seconds"] = seconds
        if right:
            self.fields["lease_kept"] = right

    def not_stored(self, reason: str) -> None:
        """The turn finished and there is nothing to keep."""
        self._metrics.not_stored[reason].inc()
        self.fields["not_stored"] = reason

    def client_left(self, stage: str) -> None:
        """The client is gone."""
        self._metrics.disconnects[stage].inc()
        self.fields["client_left"] = stage

    def finish(self, status: int) -> None:
        """The turn is over."""
        self._leg_over("abandoned")
        seconds = self._context.now() - self.arrived
        self._metrics.requests[self.fields["api"], str(status)].inc()
        self._metrics.turn_seconds.observe(seconds)
        self.fields["status"] = status
        self.fields["ended_at"] = round(time.time(), 3)
        self.fields["total_ms"] = round(seconds * 1e3, 2)
        self._context.decisions.append(self.fields)
        log_turn(self.fields)
        if self._trace is not None:
            self._trace.finish(self.fields, self._context.models())


def _of_prefill(result: Prefilled) -> dict[str, int]:
    """What a prefill leg's span tells about it."""
    report = result.report
    local, pulled = (None, None) if report is None else (report.local_tokens, report.pulled_tokens)
    found = {
        "gen_ai.usage.input_tokens": result.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": reused_tokens(result.cached_tokens, local, pulled),
        "pd.reuse.pulled_tokens": pulled,
        "pd.reuse.local_tokens": local,
    }
    return {name: value for name, value in found.items() if value is not None}
