"""How the figures of a router's processes become the router's: what is added, and where a sum would be nonsense.

Separate from the pages that are read and written because the rule for each metric is a decision. Counts and amounts
are added. What each process says about the same thing is not: of an engine that one worker cannot reach, the least
favourable view is the router's, since that worker's share of the traffic is in trouble.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final


class Rule(Enum):
    """What becomes of several values of one series."""

    SUM = "sum"
    LEAST = "least"
    MOST = "most"


GAUGES: Final[Mapping[str, Rule]] = {
    "pd_router_build_info": Rule.MOST,
    "pd_router_discovery_connected": Rule.LEAST,
    "pd_router_discovery_event_age_seconds": Rule.MOST,
    "pd_router_discovery_list_age_seconds": Rule.MOST,
    "pd_router_engine_breaker_state": Rule.MOST,
    "pd_router_engine_prefill_tokens": Rule.SUM,
    "pd_router_engine_ready": Rule.LEAST,
    "pd_router_engine_turns": Rule.SUM,
    "pd_router_engines": Rule.MOST,
    "pd_router_handle_bytes": Rule.SUM,
    "pd_router_handle_store_up": Rule.LEAST,
    "pd_router_handles": Rule.SUM,
    "pd_router_inflight": Rule.SUM,
    "pd_router_leases_kept": Rule.SUM,
    "pd_router_leg_inflight": Rule.SUM,
    "pd_router_pair_quarantined": Rule.MOST,
    "pd_router_pinned_handles": Rule.SUM,
    "pd_router_pinned_tokens": Rule.SUM,
    "pd_router_queued": Rule.SUM,
    "pd_router_stale_files": Rule.MOST,
    "pd_router_workers": Rule.SUM,
    "process_max_fds": Rule.LEAST,
    "process_open_fds": Rule.MOST,
    "process_resident_memory_bytes": Rule.SUM,
    "process_start_time_seconds": Rule.LEAST,
    "process_virtual_memory_bytes": Rule.SUM,
}
"""By metric. Descriptors have a limit per process, so the process that is nearest to its own counts."""
SEEN_BY_ALL: Final = frozenset({"pd_router_engine_incarnations"})
"""Counters of what every worker sees happen: a sum would be as many times as there are workers."""
_GOOD: Final = frozenset({("pd_router_engines", "ready"), ("pd_router_engine_breaker_state", "closed")})
"""Metric and state of which the least is the worst."""
CUMULATIVE: Final = frozenset({"counter", "histogram", "summary"})
"""Types whose series only grow; what a process counted stays counted when it has ended."""


def rule_of(name: str, kind: str, labels: Mapping[str, str]) -> Rule:
    """For one series of a metric."""
    if kind in CUMULATIVE:
        return Rule.MOST if name in SEEN_BY_ALL else Rule.SUM
    if name.endswith("_created") or (name, labels.get("state")) in _GOOD:
        return Rule.LEAST
    return GAUGES.get(name, Rule.MOST)


def combine(rule: Rule, values: Iterable[float]) -> float:
    """One value of several, at least one. What one process does not know (NaN) the router does not know."""
    found = list(values)
    if rule is Rule.SUM:
        return math.fsum(found)
    if any(map(math.isnan, found)):
        return math.nan
    return min(found) if rule is Rule.LEAST else max(found)
