"""How far one request's transfers have come, and which completions the scheduler can take.

vLLM keeps this as flags inside the request's parameter dict and asserts when a completion names a request that it has
already freed (EL-03). Here it is an enum with a table: what is not in the table does not happen, and a completion that
is not in the table is dropped before vLLM's scheduler sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Progress(StrEnum):
    """State of a request, from its arrival until vLLM's scheduler forgets it."""

    WAITING = "waiting"
    """Not allocated yet: what may be pulled is only an offer, and asking again changes nothing."""
    PULLING = "pulling"
    """A read is queued or running; vLLM holds the blocks until its completion is reported."""
    SETTLED = "settled"
    """The one transfer of this request is over, or there was none; it is never offered again (HL-07)."""
    DRAINING = "draining"
    """Aborted during the read: the blocks may be freed only when the read is over."""
    RETAINED = "retained"
    """Finished; the blocks wait for a reader or for the end of their lease."""
    GONE = "gone"
    """vLLM has freed the blocks and forgotten the request."""


class Event(StrEnum):
    """What can happen to a request."""

    ALLOCATED_TO_PULL = "allocated to pull"
    ALLOCATED = "allocated"
    RECEIVED = "received"
    FINISHED = "finished"
    FINISHED_RETAINED = "finished, blocks retained"
    SENT = "sent"


TRANSITIONS: Final[Mapping[tuple[Progress, Event], Progress]] = {
    (Progress.WAITING, Event.ALLOCATED_TO_PULL): Progress.PULLING,
    (Progress.WAITING, Event.ALLOCATED): Progress.SETTLED,
    (Progress.WAITING, Event.FINISHED): Progress.GONE,
    (Progress.PULLING, Event.RECEIVED): Progress.SETTLED,
    (Progress.PULLING, Event.FINISHED): Progress.DRAINING,
    # A request comes back to allocation after a preemption or after a failed load.
    (Progress.SETTLED, Event.ALLOCATED): Progress.SETTLED,
    (Progress.SETTLED, Event.FINISHED): Progress.GONE,
    (Progress.SETTLED, Event.FINISHED_RETAINED): Progress.RETAINED,
    (Progress.DRAINING, Event.RECEIVED): Progress.GONE,
    (Progress.RETAINED, Event.SENT): Progress.GONE,
}


class IllegalTransition(ValueError):
    """vLLM called a hook in an order that the table does not know: the supported versions never do."""


def step(state: Progress, event: Event) -> Progress:
    """The state after ``event``.

    Raises:
        IllegalTransition: when the event cannot happen in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a request that is {state} cannot be {event}") from None


@dataclass(frozen=True, slots=True)
class Completions:
    """One step's completions after the check."""

    received: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()
    """One sentence per completion that vLLM must not see."""
    states: Mapping[str, Progress] = field(default_factory=dict)
    """New state of every request that a kept completion moved."""


def admit_completions(states: Mapping[str, Progress], received: Iterable[str], sent: Iterable[str]) -> Completions:
    """Keep the completions that vLLM's scheduler can take without an assertion or a premature free.

    vLLM handles all receives before all sends, so they are checked in that order, each against the state that the ones
    before it leave behind.

    Args:
        states: progress by request id; an unknown id is a request that vLLM has forgotten.
        received: ids that the worker reports as received in this step.
        sent: ids that the worker reports as sent, or whose lease ended, in this step.
    """
    now = dict(states)
    moved: dict[str, Progress] = {}
    dropped: list[str] = []

    def keep(request_id: str, event: Event) -> bool:
        state = now.get(request_id, Progress.GONE)
        after = TRANSITIONS.get((state, event))
        if after is None:
            dropped.append(f"{request_id} reported as {event} while {state}")
            return False
        now[request_id] = moved[request_id] = after
        return True

    kept_received = frozenset(request_id for request_id in sorted(received) if keep(request_id, Event.RECEIVED))
    kept_sent = frozenset(request_id for request_id in sorted(sent) if keep(request_id, Event.SENT))
    return Completions(kept_received, kept_sent, tuple(dropped), moved)
