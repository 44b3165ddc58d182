"""What `pdctl top` shows, computed from the metrics of one or more routers and their lists of engines.

Separate from the screen so that a script gets the same figures as JSON. Unknown is None and never 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdctl.core.top_window import Window

STAGES: Final = ("eligible", "found", "live", "attached", "proven", "pulled")
PARTS: Final = ("queue", "prefill", "handoff", "first_token", "ttft", "turn")
QUANTILES: Final = (0.5, 0.95, 0.99)
BREAKERS: Final = ("closed", "half_open", "open")
"""From best to worst; of several routers the worst counts."""
RESULTS: Final = ("ok", "refused", "failed", "abandoned")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, estimated from buckets. None: nothing was observed in the window."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, as the routers see it. `kv_usage`: share of its KV memory, as it says itself; None: not to be had."""

    engine: str
    role: str
    generation: str
    ready: bool
    draining: bool
    breaker: str
    quarantined: int
    turns: int
    prefill_tokens: int
    handles: int
    pinned_tokens: int
    kv_usage: float | None
    legs: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """One screen. Counts are of the window; `window_seconds` None: since the routers' start."""

    window_seconds: float | None
    routers: int
    version: str
    answers: int
    """Of any kind, refusals and requests that pass to one engine included."""
    answers_by_status: Mapping[str, int]
    inflight: int
    queued: int
    retries: int
    latency: Mapping[str, Latency]
    funnel: Mapping[str, int]
    drops: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    pulled_tokens: int
    handles: int | None
    store_up: bool | None
    engines: Sequence[Engine]

    @property
    def pulled_share(self) -> float | None:
        """Of the prompt tokens, those that were read back."""
        return self.pulled_tokens / self.prompt_tokens if self.prompt_tokens else None


def figures(
    window: Window, fleets: Sequence[Sequence[Mapping[str, Any]]], kv_usage: Mapping[str, float | None]
) -> Figures:
    """Put a screen together.

    Args:
        window: of all routers.
        fleets: each router's `/debug/fleet`.
        kv_usage: by engine.
    """
    statuses = _whole(window.gains("pd_router_requests_total", "status"))
    versions = window.by("pd_router_build_info", "version")
    handles, up = window.now("pd_router_handles"), window.now("pd_router_handle_store_up")
    return Figures(
        window_seconds=window.seconds,
        routers=len(fleets),
        version=", ".join(sorted(versions)),
        answers=sum(statuses.values()),
        answers_by_status={status: count for status, count in sorted(statuses.items()) if count},
        inflight=_sum(window.now("pd_router_inflight")),
        queued=_sum(window.now("pd_router_queued")),
        retries=round(window.gain("pd_router_retries_total")),
        latency={part: _latency(window, part) for part in PARTS},
        funnel=_funnel(window),
        drops=_sorted(_whole(window.gains("pd_router_reuse_drop_total", "reason"))),
        prompt_tokens=round(window.gain("pd_router_prompt_tokens_total")),
        cached_tokens=round(window.gain("pd_router_cached_tokens_total")),
        pulled_tokens=round(window.gain("pd_router_pulled_tokens_total")),
        handles=_sum(handles) if handles else None,
        store_up=all(up) if up else None,
        engines=_engines(window, fleets, kv_usage),
    )


def _latency(window: Window, part: str) -> Latency:
    name = f"pd_router_{part}_seconds"
    return Latency(round(window.gain(f"{name}_count")), *window.quantiles(name, QUANTILES))


def _funnel(window: Window) -> dict[str, int]:
    gained = _whole(window.gains("pd_router_reuse_stage_total", "stage"))
    return {stage: gained.get(stage, 0) for stage in STAGES}


def _engines(
    window: Window, fleets: Sequence[Sequence[Mapping[str, Any]]], kv_usage: Mapping[str, float | None]
) -> list[Engine]:
    views: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for fleet in fleets:
        for member in fleet:
            views.setdefault((str(member["role"]), str(member["engine"])), []).append(member)
    pinned = window.by("pd_router_pinned_tokens", "engine")
    handles = window.by("pd_router_pinned_handles", "engine")
    return [
        Engine(
            engine=key,
            role=role,
            generation=", ".join(sorted({str(view["generation"]) for view in seen})),
            # One router that can't reach it is worth seeing; one that can doesn't make it reachable for the other.
            ready=all(view["ready"] for view in seen),
            draining=any(view["draining"] for view in seen),
            breaker=max((str(view.get("breaker", "closed")) for view in seen), key=_worse),
            quarantined=sum(len(view.get("quarantined_with", ())) for view in seen),
            turns=sum(int(view["turns"]) for view in seen),
            prefill_tokens=sum(int(view["prefill_tokens"]) for view in seen),
            handles=_sum(handles.get(key, ())),
            pinned_tokens=_sum(pinned.get(key, ())),
            kv_usage=kv_usage.get(key),
            legs={
                result: count
                for result, count in _whole(
                    window.gains("pd_router_engine_legs_total", "result", role=role, engine=key)
                ).items()
                if result in RESULTS
            },
        )
        # Prefill first, then by name.
        for (role, key), seen in sorted(views.items(), key=lambda item: (item[0][0] != "prefill", item[0][1]))
    ]


def _worse(state: str) -> int:
    return BREAKERS.index(state) if state in BREAKERS else len(BREAKERS)


def _whole(gained: Mapping[str, float]) -> dict[str, int]:
    return {key: round(value) for key, value in gained.items()}


def _sorted(counts: Mapping[str, int]) -> dict[str, int]:
    """Most first, without those that did not happen."""
    return {key: count for key, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


def _sum(values: Sequence[float]) -> int:
    return round(sum(values))
