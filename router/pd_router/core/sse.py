"""The engine's answer on its way to the client: every byte as it came, except the handle (RP-01, RP-02, RP-05, IS-02).

Decides where an event ends, what is cut out of it, and how the stream ended. Works on bytes: an event is passed on
once it is whole, without having been parsed, unless it names the handle or no content has come yet. What the stream
said (reply, usage, ending) is read once, at the end, from the events kept for that purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any, Final

from pd_router.core import transcript
from pd_router.core.cutting import ERROR, ESCAPE, Handle, cut_event, is_error, strip_json, suspicious
from pd_router.core.dialect import OPENAI, Dialect
from pd_router.core.history import Reply
from pd_router.core.transcript import Transcript, parse_answer
from pd_router.core.usage import USAGE, Correct

__all__ = ["Ending", "EventTooLarge", "SseFilter", "parse_answer", "split_events", "strip_json"]

MAX_KEPT: Final = 16 * 1024 * 1024
MAX_EVENT: Final = 64 * 1024 * 1024
_DONE_CHUNK: Final = b"[DONE]\n\n\r\n"
_DONE: Final = b"data: [DONE]"
_GAP: Final = b"\n\n"
_SIZE_REACH: Final = 10
"""Bytes in which the end of a chunk's size line is looked for."""
_SIZE_LINES: Final = {len(line) + size + 2: line for size in range(1, 1024) for line in (b"%x\r\n" % size,)}
"""By its length: how a read begins that is one chunk, of those that hold a token."""
_MANY: Final = 4096
"""Bytes of a read that may hold so many tokens that it is cheaper to look at their letters only."""
_HEX: Final = b"0123456789abcdefABCDEF"
_TAIL: Final = 8
"""Events kept when the rest is dropped: enough for finish, usage and [DONE]."""


class Ending(StrEnum):
    """How a stream ended. Only `CLEAN` may leave a handle behind."""

    CLEAN = "clean"
    ERROR_EVENT = "error_event"
    ERROR_FINISH = "error_finish"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


class EventTooLarge(Exception):
    """One event exceeds the limit: it can neither be passed on unseen nor be held."""


class SseFilter:
    """One streamed answer. `feed` and `flush` return the bytes for the client.

    Until `started` is true nothing may reach the client, so that a failing turn can still become a retry or a 5xx; the
    caller holds the returned bytes back. `error` is the error event's object if one came before any content.
    """

    __slots__ = (
        "_correct",
        "_dialect",
        "_events",
        "_kept",
        "_letters",
        "_max_event",
        "_max_kept",
        "_overflow",
        "_partial",
        "_read_at",
        "_token",
        "_transcript",
        "error",
        "handle",
        "poisoned",
        "started",
    )

    def __init__(
        self,
        max_kept: int = MAX_KEPT,
        max_event: int = MAX_EVENT,
        dialect: Dialect = OPENAI,
        correct: Correct | None = None,
    ) -> None:
        self.handle: Handle | None = None
        """The last handle seen, or None."""
        self.started = False
        """Content, a finish or an error has been seen."""
        self.error: dict[str, Any] | None = None
        self.poisoned = False
        """An event named the handle and could not be read; it was withheld."""
        self._dialect = dialect
        self._correct = correct
        self._partial = bytearray()
        self._events: list[bytes] = []
        self._letters: list[bytes] = []
        """What events said that came after `_events` and differ in their letters only; around them stands `_token`."""
        self._token = (b"", b"")
        self._kept = 0
        self._overflow = False
        self._max_kept = max_kept
        self._max_event = max_event
        self._transcript: Transcript | None = None
        self._read_at = 0

    def feed(self, data: bytes) -> bytes:
        """Take what a read returned, give what may be sent on: whole events only, possibly none.

        Raises:
            EventTooLarge: the event being received exceeds the limit.
        """
        if data[-2:] != b"\n\n" or self._partial:
            return self._feed_slowly(data)
        return self._emit(data)

    def passer(self, write: Callable[[bytes], None]) -> Callable[[bytes], bool]:
        """A short cut for reads that are whole HTTP chunks of whole events in which nothing is for us.

        What it returns gives such a read to `write` as it is, keeps its events and says True; any other read it leaves
        alone and says False, and the caller takes it apart and calls `feed`. A closure, because this runs once per
        token and is most of what a token costs. Of an event that is like the one before it, but for plain letters,
        only those are looked at and kept.
        """
        partial, events, said = self._partial, self._events, self._letters.append
        counting, fits = self._correct is not None, self._dialect.shape.fits
        self._settle()
        before, after = self._token = self.last_token()
        closing, opens, closes = after + b"\r\n", len(before), -len(after) - 2

        def passed(read: bytes) -> bool:
            line = _SIZE_LINES.get(len(read))
            if line is not None and not read.startswith(line):
                line = None
            if (
                line is not None
                and before
                and read.endswith(closing)
                and read.startswith(before, len(line))
                and not partial
            ):
                letters = read[len(line) + opens : closes]
                if b'"' not in letters and b"\\" not in letters and b"\n" not in letters and b"\r" not in letters:
                    said(letters)
                    self._kept += len(read)
                    if self._kept > self._max_kept:
                        self._drop_kept()
                    write(read)
                    return True
            if read[-4:] != b"\n\n\r\n" or ERROR in read or read.endswith(_DONE_CHUNK) or partial:
                return False
            if (
                b"ransfer" in read or b"RANSFER" in read or b"remote_" in read
            ):  # also in words, which are then looked at
                return False
            if counting and USAGE in read:
                return False
            if b"\\" in read and ESCAPE in read:  # one byte is found several times faster
                return False
            several = [read[len(line) : -2]] if line is not None else _several_chunks(read)
            if several is None:
                return False
            for event in several:
                if not fits(event):
                    return False
            self._settle()
            events.extend(several)
            self._kept += len(read)
            if self._kept > self._max_kept:
                self._drop_kept()
            write(read)
            return True

        return passed

    @property
    def token(self) -> tuple[bytes, bytes]:
        """What stands around the letters that `passer`, as it was made last, looks for; empty: it looks for none."""
        return self._token

    @property
    def room(self) -> int:
        """Bytes that may be kept still."""
        return self._max_kept - self._kept

    def keep_letters(self, letters: bytes, counted: int) -> None:
        """Keep what somebody else found to be letters between the two sides of `token`, and has passed on.

        Args:
            counted: the bytes that said them.
        """
        self._letters.append(letters)
        self._kept += counted
        if self._kept > self._max_kept:
            self._drop_kept()

    def flush(self) -> bytes:
        """At the end of the stream: the last event, if it came without its blank line."""
        rest = bytes(self._partial)
        self._partial.clear()
        return self._emit(rest) if rest else b""

    def ending(self, complete: bool = True, aborted: bool = False) -> Ending:
        """Judge the stream; call after `flush`.

        Args:
            complete: the engine ended the answer properly (last chunk, or close where that is the framing).
            aborted: the caller gave the turn up, or the client left before all of it was relayed.
        """
        seen = self._read()
        if aborted:
            return Ending.ABORTED
        if seen.error is not None or self.error is not None:
            return Ending.ERROR_EVENT
        if self.poisoned or not seen.finished or not (seen.done or complete):
            return Ending.TRUNCATED
        if "error" in seen.finish_reasons:
            return Ending.ERROR_FINISH
        return Ending.ABORTED if "abort" in seen.finish_reasons else Ending.CLEAN

    def reply(self) -> Reply | None:
        """The assistant message as a client assembles it; None for several choices, completions, too long a stream."""
        return None if self._overflow else self._read().reply()

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last usage object, or None."""
        return self._read().usage

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Finish reasons of all choices, in order of arrival."""
        return self._read().finish_reasons

    @property
    def response_id(self) -> str:
        """The answer's id, or ""."""
        return self._read().id

    @property
    def calls_tools(self) -> bool:
        """See `Transcript.calls_tools`."""
        return self._read().calls_tools

    @property
    def done(self) -> bool:
        """Whether [DONE] was seen."""
        return self._read().done

    def _feed_slowly(self, data: bytes) -> bytes:
        partial = self._partial
        start = max(0, len(partial) - 3)
        partial += data
        end = _last_event_end(partial, start)
        if end <= 0:
            if len(partial) > self._max_event:
                raise EventTooLarge(f"an event exceeds {self._max_event} bytes")
            return b""
        if end == len(partial):
            whole = bytes(partial)
            partial.clear()
        else:
            whole = bytes(partial[:end])
            del partial[:end]
        return self._emit(whole)

    def _emit(self, whole: bytes) -> bytes:
        """Pass on whole events, without the handle, and keep them for the end."""
        if len(whole) > _MANY:
            run = transcript.find_run(whole)
            # Letters without a quote hold no key, and around them all is as in the first event of the run.
            if run is not None and self._is_plain(run.first) and USAGE not in run.first and not suspicious(run.letters):
                before = self._emit_few(whole[: run.start])
                if not self.started:
                    self._look(run.first)
                self._keep(run.merged, run.end - run.start)
                return b"".join((before, whole[run.start : run.end], self._emit_few(whole[run.end :])))
        return self._emit_few(whole)

    def _emit_few(self, whole: bytes) -> bytes:
        if not whole:
            return b""
        sent = self._clean_few(whole)
        if self._correct is not None and USAGE in sent:
            sent = self._correct(sent)
        if not self.started:
            self._look(sent)
        self._keep(sent)
        return sent

    def _clean_few(self, whole: bytes) -> bytes:
        """Look at those events that may hold what is not for the client."""
        if b"\r" in whole:
            events = split_events(whole)
        else:
            *ended, rest = whole.split(_GAP)
            if not suspicious(whole) and not rest and all(map(self._fits, ended)):
                return whole
            events = [event + _GAP for event in ended]
            if rest:
                events.append(rest)
        return b"".join([event if self._is_plain(event) else self._clean(event) for event in events])

    def _fits(self, event: bytes) -> bool:
        """Whether an event, without the empty line at its end, looks like the API's."""
        return self._dialect.shape.fits(event + _GAP) or event == _DONE

    def _is_plain(self, event: bytes) -> bool:
        return event == _DONE + _GAP or (self._dialect.shape.fits(event) and not suspicious(event))

    def _clean(self, event: bytes) -> bytes:
        cut = cut_event(event, self._dialect.error_event)
        if cut is None:
            self.poisoned = True
            return b""
        if cut.handle is not None:
            self.handle = cut.handle
        return cut.rest

    def _look(self, whole: bytes) -> None:
        """See whether content has come; what follows the first of it is not looked at."""
        for one in iter_events(whole):
            for event in transcript.parse_events(one):
                if is_error(event):
                    self.error = transcript.error_of(event)
                    self.started = True
                elif self._dialect.bears_content(event):
                    self.started = True
            if self.started:
                return

    def last_token(self) -> tuple[bytes, bytes]:
        """What stands around the letters of the event that came last; empty where it holds none that are plain, or
        more has come than whole events."""
        if self._partial:
            return b"", b""
        if self._letters:
            return self._token
        last = self._events[-1] if self._events else b""
        gap = last.rfind(b"\n\n", 0, -2)
        event = last if gap < 0 else last[gap + 2 :]
        if suspicious(event) or USAGE in event:
            return b"", b""
        return transcript.around_letters(event) or (b"", b"")

    def _settle(self) -> None:
        """Make one event of the letters."""
        if self._letters:
            before, after = self._token
            self._events.append(before + b"".join(self._letters) + after)
            self._letters.clear()

    def _keep(self, events: bytes, counted: int | None = None) -> None:
        """`counted`: their size as they came, where they say it in fewer bytes."""
        self._settle()
        self._events.append(events)
        self._kept += len(events) if counted is None else counted
        if self._kept > self._max_kept:
            self._drop_kept()

    def _drop_kept(self) -> None:
        self._overflow = True
        self._transcript = None
        self._letters.clear()
        del self._events[:-_TAIL]
        self._kept = 0

    def _read(self) -> Transcript:
        self._settle()
        if self._transcript is None or self._read_at != len(self._events):
            self._transcript = self._dialect.read(self._events)
            self._read_at = len(self._events)
        return self._transcript


def split_events(whole: bytes) -> list[bytes]:
    """Cut a run of whole events into single ones; joined they are the input."""
    return list(iter_events(whole))


def iter_events(whole: bytes) -> Iterator[bytes]:
    """The events of a run, one at a time."""
    start = 0
    while start < len(whole):
        end = _first_event_end(whole, start)
        yield whole[start:end]
        start = end


def _several_chunks(read: bytes) -> list[bytes] | None:
    """The bodies of the HTTP chunks that a read consists of; None when one of them is not whole events."""
    bodies: list[bytes] = []
    at = 0
    while at < len(read):
        line = read.find(b"\r\n", at, at + _SIZE_REACH)
        size = read[at:line]
        if not size or size.strip(_HEX):  # int() would also take 0x, signs, spaces and underscores
            return None
        end = line + 2 + int(size, 16)
        if read[end - 2 : end + 2] != b"\n\n\r\n":
            return None
        bodies.append(read[line + 2 : end])
        at = end + 2
    return bodies


_ENDS: Final = (b"\n\n", b"\n\r\n", b"\r\r")
"""A line end followed by an empty line, for lines that end in LF, CRLF or a mixture, and for CR alone."""


def _last_event_end(data: bytearray, start: int) -> int:
    best = 0
    for mark in _ENDS:
        at = data.rfind(mark, start)
        if at >= 0:
            best = max(best, at + len(mark))
    return best


def _first_event_end(data: bytes, start: int) -> int:
    best = len(data)
    for mark in _ENDS:
        at = data.find(mark, start, best)
        if at >= 0:
            best = min(best, at + len(mark))
    return best
