"""Knobs: how a fake engine answers, and how it fails, at a chosen point of its answer.

Values only. A test appends rules to an engine's plan; the first rule that fits a request is used, a number of times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal

from support.fake_engine.answers import AnswerStyle

if TYPE_CHECKING:
    from support.fake_engine.engine import Record


class Point(StrEnum):
    """Where in the answer; the order is the order in time."""

    BEFORE_ADMISSION = "before admission"
    """No block was taken and no handle was used."""

    BEFORE_HEADERS = "before headers"
    AFTER_HEADERS = "after headers"
    AFTER_FIRST_EVENT = "after first event"
    AFTER_FIRST_CONTENT = "after first content"
    BEFORE_FINISH = "before finish"
    BEFORE_DONE = "before done"


class Kind(StrEnum):
    """How an answer goes wrong."""

    STATUS = "status"
    """An error answer; only before the headers."""

    CLOSE = "close"
    """The connection ends in order, in the middle of the answer."""

    RESET = "reset"
    HANG = "hang"
    """Nothing more is sent, and the connection stays open until the other side gives up."""

    ERROR_EVENT = "error event"
    FINISH_ERROR = "finish error"
    """``finish_reason: "error"``, as an engine reports a failed KV load or a failed constraint."""

    TRUNCATE = "truncate"
    """The body ends in order, without finish reason and ``[DONE]``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure. ``status``, ``body`` and ``headers`` are for `Kind.STATUS`."""

    kind: Kind
    at: Point = Point.BEFORE_HEADERS
    status: int = 500
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


EARLY_FAULTS: Final = (
    Fault(Kind.STATUS, Point.BEFORE_ADMISSION, 500),
    Fault(Kind.RESET, Point.BEFORE_HEADERS),
    Fault(Kind.FINISH_ERROR, Point.AFTER_HEADERS),
    Fault(Kind.ERROR_EVENT, Point.AFTER_FIRST_EVENT),
    Fault(Kind.TRUNCATE, Point.AFTER_FIRST_EVENT),
    Fault(Kind.CLOSE, Point.AFTER_HEADERS),
)
"""What may befall a turn before its client has content: each costs one attempt and no more."""


class Gate:
    """Holds a stream in front of its ``event``-th event (from 0) until the test opens it."""

    def __init__(self, event: int) -> None:
        self.event = event
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    async def pass_through(self) -> None:
        """Wait for `open`."""
        self.reached.set()
        await self._open.wait()

    @property
    def opened(self) -> bool:
        """Whether the stream may go on."""
        return self._open.is_set()

    def open(self) -> None:
        """Let the stream go on."""
        self._open.set()


HandlePlace = Literal["first", "finish", "usage", "extra", "none"]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How to answer one request.

    Attributes:
        fault: what goes wrong, and where.
        style: the shape of the answer.
        handle_on: which event of a stream carries the handle; ``extra`` is an event of its own.
        edit_handle: changes the handle on its way out (malformed handles). The judge then knows the edited one.
        hold: wait for this before the first byte of any answer, after the KV is there.
        event_delay: seconds between events.
        piece_chars: characters per content event.
        cuts: byte offsets at which the stream is cut into separate writes; None writes event by event.
        cut_delay: seconds between those writes.
        gate: hold the stream at one event.
        line_end, data_space, comments: SSE dialect.
        comment_bytes: length of each comment, to make a stream large at little cost.
        gzip: compress when the request accepts it.
        load_failure: what a client sees when KV cannot be loaded: a 500, finish reason "error", nothing for ever, or a
            right answer that took longer.
        errors_carry_params: error bodies and error events contain a handle, as a careless engine might.
        headers: added to the answer.
    """

    fault: Fault | None = None
    style: AnswerStyle = field(default_factory=AnswerStyle)
    handle_on: HandlePlace = "finish"
    edit_handle: Callable[[dict[str, Any]], Any] | None = None
    hold: asyncio.Event | None = None
    event_delay: float = 0.0
    piece_chars: int = 12
    cuts: tuple[int, ...] | None = None
    cut_delay: float = 0.0
    gate: Gate | None = None
    line_end: bytes = b"\n"
    data_space: bool = True
    comments: bool = False
    comment_bytes: int = 0
    gzip: bool = False
    load_failure: Literal["fail", "finish_error", "hang", "recompute"] = "fail"
    errors_carry_params: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


def any_request(_record: Record) -> bool:
    """Fits every request."""
    return True


def with_handle(record: Record) -> bool:
    """Fits requests that carry somebody's handle."""
    return record.handle_id is not None


def without_handle(record: Record) -> bool:
    """Fits requests that carry nobody's handle."""
    return record.handle_id is None


@dataclass(slots=True)
class Rule:
    """Use ``behaviour`` for the next ``times`` fitting requests (None: for all)."""

    behaviour: Behaviour
    times: int | None = 1
    when: Callable[[Record], bool] = any_request
