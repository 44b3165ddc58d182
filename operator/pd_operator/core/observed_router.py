"""A router's `/status` answer → what it means for KV reuse, and whether the router sees which engines there are.

The answer holds counters that move with every turn; what is kept of it changes only when its meaning does. Whether
tokens flow *now* can't be read from one answer, so a track remembers the count of attached turns at the last progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pd_operator.core.observed_pods import one_line
from pd_wire import names

STARVED_AFTER: Final = 10
"""Turns with a handle in a row without one pulled token that make a verdict; a few may be short tails or restarts."""

TROUBLE_LIMIT: Final = 200
"""Most characters of a router's trouble that are kept."""


class Flow(StrEnum):
    """Do tokens flow from decode back to prefill?"""

    NO_TURNS = "no-turns"
    FLOWING = "flowing"
    STARVED = "starved"
    REUSED = "reused"
    """Nothing is pulled because decode has given the blocks to other requests by then."""


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """What one router said.

    Attributes:
        reuse: it attaches handles.
        pairs: some generation has a ready prefill and a ready decode engine.
        retentions: what its ready decode engines do with finished turns' blocks, as far as they have said.
        fallbacks: why some of them retain Pinned although they were told otherwise.
        trouble: why it can't list pods, in its own words; empty when it can, or could a moment ago.
    """

    reuse: bool
    pairs: bool
    flow: Flow = Flow.NO_TURNS
    retentions: frozenset[str] = frozenset()
    fallbacks: frozenset[str] = frozenset()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class RouterTrack:
    """One router process over time: its start time, and its counters when it last reported more pulled tokens.

    `troubled`: it could not list pods when it was asked last. Once may be an API server that restarts.
    """

    started: float
    attached: int
    pulled_tokens: int
    gone_tokens: int = 0
    troubled: bool = False


def read_router(body: Any, track: RouterTrack | None) -> tuple[RouterAnswer, RouterTrack]:
    """Judge one answer in the light of the earlier ones.

    Raises:
        ValueError: when the body is not a router's status.
    """
    if not isinstance(body, Mapping) or body.get("reuse") not in ("on", "off"):
        raise ValueError("not a router's status")
    funnel = body.get("funnel") or {}
    try:
        attached, pulled, started = int(funnel["attached"]), int(funnel["pulled_tokens"]), float(body["started"])
        gone = int(funnel.get("gone_tokens", 0))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a router's status: {error}") from None
    trouble = _trouble(body)
    known = track is not None and track.started == started
    lasting = trouble if not known or (track is not None and track.troubled) else ""
    if track is None or track.started != started:
        # Of a process that was busy before we looked, one pulled token speaks for all earlier turns.
        track = RouterTrack(started, attached if pulled else 0, pulled, gone)
    elif pulled > track.pulled_tokens:
        track = RouterTrack(started, attached, pulled, gone)
    if attached - track.attached >= STARVED_AFTER:
        flow = Flow.REUSED if gone > track.gone_tokens else Flow.STARVED
    else:
        flow = Flow.FLOWING if pulled else Flow.NO_TURNS
    engines = body.get("engines") or ()
    answer = RouterAnswer(
        body["reuse"] == "on",
        _has_pair(engines),
        flow,
        _said(engines, "retention"),
        _said(engines, "fallback"),
        lasting,
    )
    return answer, replace(track, troubled=bool(trouble))


def _trouble(body: Mapping[str, Any]) -> str:
    """A router with a fixed list of engines discovers none."""
    discovery = body.get("discovery")
    return one_line(discovery.get("trouble"), TROUBLE_LIMIT) if isinstance(discovery, Mapping) else ""


def _said(engines: Any, key: str) -> frozenset[str]:
    """What ready decode engines have said under a key; a router of an earlier release says nothing."""
    return frozenset(
        str(engine[key])
        for engine in engines
        if engine.get("ready") and engine.get("role") == names.ROLE_DECODE and engine.get(key)
    )


def _has_pair(engines: Any) -> bool:
    ready: dict[str, set[str]] = {names.ROLE_PREFILL: set(), names.ROLE_DECODE: set()}
    for engine in engines:
        if engine.get("ready") and not engine.get("draining") and engine.get("role") in ready:
            ready[engine["role"]].add(str(engine.get("generation", "")))
    return bool(ready[names.ROLE_PREFILL] & ready[names.ROLE_DECODE])
