"""A router's `/status` answer → what it means for KV reuse.

The answer holds counters that move with every turn; what is kept of it changes only when its meaning does. Whether
tokens flow *now* can't be read from one answer, so a track remembers the count of attached turns at the last progress.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pd_wire import names

STARVED_AFTER: Final = 10
"""Turns with a handle in a row without one pulled token that make a verdict; a few may be short tails or restarts."""


class Flow(StrEnum):
    """Do tokens flow from decode back to prefill?"""

    NO_TURNS = "no-turns"
    FLOWING = "flowing"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """What one router said.

    Attributes:
        reuse: it attaches handles.
        pairs: some generation has a ready prefill and a ready decode engine.
    """

    reuse: bool
    pairs: bool
    flow: Flow = Flow.NO_TURNS


@dataclass(frozen=True, slots=True)
class RouterTrack:
    """One router process over time: its start time, and its counters when it last reported more pulled tokens."""

    started: float
    attached: int
    pulled_tokens: int


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
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a router's status: {error}") from None
    if track is None or track.started != started:
        # Of a process that was busy before we looked, one pulled token speaks for all earlier turns.
        track = RouterTrack(started, attached if pulled else 0, pulled)
    elif pulled > track.pulled_tokens:
        track = RouterTrack(started, attached, pulled)
    if attached - track.attached >= STARVED_AFTER:
        flow = Flow.STARVED
    else:
        flow = Flow.FLOWING if pulled else Flow.NO_TURNS
    return RouterAnswer(body["reuse"] == "on", _has_pair(body.get("engines") or ()), flow), track


def _has_pair(engines: Any) -> bool:
    ready: dict[str, set[str]] = {names.ROLE_PREFILL: set(), names.ROLE_DECODE: set()}
    for engine in engines:
        if engine.get("ready") and not engine.get("draining") and engine.get("role") in ready:
            ready[engine["role"]].add(str(engine.get("generation", "")))
    return bool(ready[names.ROLE_PREFILL] & ready[names.ROLE_DECODE])
