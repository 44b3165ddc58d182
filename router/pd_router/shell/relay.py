"""Decode's answer on its way to the client: held until it begins, relayed, ended, and its handle kept.

Separate from the turn because this is the hot path, one callback per chunk, and because here the line is drawn after
which a turn cannot be tried again: nothing is written to the client until decode has produced content.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final

from pd_router.core import errors
from pd_router.core.dialect import Dialect
from pd_router.core.errors import ApiError
from pd_router.core.history import Reply
from pd_router.core.sse import Ending, EventTooLarge, SseFilter, split_events, strip_json
from pd_router.core.transcript import Transcript
from pd_router.core.usage import Correct
from pd_router.shell.context import Context
from pd_router.shell.exchange import Exchange, Failure, LegError, Pumping
from pd_router.shell.legs import CLIENT_LEFT, LegFailed, relayed_headers
from pd_router.shell.record import TurnRecord
from pd_router.shell.responder import Responder

Keep = Callable[[dict[str, Any] | None, Reply | None, str, bool], asyncio.Future[None] | None]
"""Keeps the handle of an answer; the last argument says whether it calls tools. The last byte waits for the future, if
there is one: the next turn may come at once."""
Headers = list[tuple[bytes, bytes]]
MAX_HELD: Final = 8 * 1024 * 1024
"""Bytes of events that are held because none bears content. The first event may name a long prompt's token ids, and
those of the Responses API repeat instructions and tools, twice."""
MAX_BEHIND_END: Final = 64 * 1024
"""Bytes that may follow what said it was the end, and was none."""


async def send_whole(
    record: TurnRecord,
    responder: Responder,
    exchange: Exchange,
    raw: bytes,
    own_headers: Headers,
    prefilled_at: float,
    keep: Keep,
    dialect: Dialect,
    correct: Correct | None,
) -> None:
    """Send an answer that is not streamed. Raises LegFailed when it is not one."""
    try:
        clean, handle = strip_json(raw)
    except ApiError as error:
        raise LegFailed("decode", "malformed_answer", error) from error
    answer = dialect.parse_answer(clean)
    ending = _whole_ending(answer)
    record.ended(ending)
    if ending is not Ending.CLEAN:
        raise LegFailed("decode", ending.value, errors.upstream_failed("decode", "it ended the answer with an error"))
    if responder.gone:
        return
    record.first_content(prefilled_at)
    keeping = keep(handle, answer.reply(), answer.id, answer.calls_tools)
    if keeping is not None:
        await keeping
    shown = clean if correct is None else correct(clean)
    responder.send(200, [*relayed_headers(exchange), *own_headers], shown)


class StreamRelay:
    """One streamed answer."""

    def __init__(
        self,
        context: Context,
        record: TurnRecord,
        responder: Responder,
        exchange: Exchange,
        own_headers: Headers,
        prefilled_at: float,
        dialect: Dialect,
        correct: Correct | None,
    ) -> None:
        self._now = context.now
        self._idle = context.settings.timeouts.idle
        self._record = record
        self._responder = responder
        self._exchange = exchange
        self._own_headers = own_headers
        self._prefilled_at = prefilled_at
        self._dialect = dialect
        self._filter = SseFilter(context.settings.reuse.reply_cap_bytes, dialect=dialect, correct=correct)
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._left = 0.0
        """Seconds that the first content had left when reading was paused."""
        self._last = b""
        self._doubtful = False
        """The engine said that the answer is over, and it isn't: clients stop reading there, so it is held back."""
        self._keep: Keep | None = None
        self._keeping: asyncio.Future[None] | None = None
        self._over = self._judged = False
        self._pumping: Pumping | None = None
        self._failure: LegFailed | LegError | None = None
        self._status = 200

    async def run(self, keep: Keep) -> int:
        """Relay to the end. Returns the status to record.

        Raises:
            LegFailed, LegError: decode failed and nothing has reached the client.
        """
        self._keep = keep
        exchange, responder = self._exchange, self._responder
        responder.on_pause = self._pause
        responder.on_resume = self._resume
        if responder.paused:
            self._pause()  # an earlier answer is still not taken; `on_pause` is not called a second time
        early = b"".join(exchange.parts)
        exchange.parts.clear()
        exchange.on_data = self._data
        if early:
            self._data(early)
        if exchange.complete or exchange.failure is not None:
            self._end()
        else:
            exchange.on_end = self._end
            await exchange.ended()
        exchange.on_data = exchange.on_end = None  # or the two would wait for the garbage collector
        if self._keeping is not None:
            await self._keeping
            self._kept()  # waiting for what is done does not wait for its callbacks
        if self._failure is not None:
            raise self._failure
        return self._status

    def _data(self, data: bytes) -> None:
        """Bytes from decode, once per read."""
        exchange, stream = self._exchange, self._filter
        try:
            out = stream.feed(data)
        except EventTooLarge as error:
            exchange.abort(Failure.MALFORMED, str(error))
            return
        if self._doubtful and len(self._last) > MAX_BEHIND_END:
            exchange.abort(Failure.MALFORMED, "it went on behind the end")
            return
        if self._dialect.may_end(out):
            self._keep_handle()
            self._doubtful = self._keep is not None and stream.done
            if self._doubtful or self._keeping is not None:
                exchange.take_no_framed()  # or what comes behind would overtake what is held back
        if exchange.complete or self._keeping is not None or self._doubtful:
            self._last += out  # goes out with the end of the answer, in one write
            return
        if self._last:
            out, self._last = self._last + out, b""
        self._pass_on(out)

    def _pass_on(self, out: bytes) -> None:
        exchange, stream, responder = self._exchange, self._filter, self._responder
        if responder.started:
            responder.write(out)
        else:
            if out:
                self._held.append(out)
                self._held_bytes += len(out)
            if stream.started and stream.error is None:
                if responder.gone:
                    exchange.abort()  # P's blocks have been read by now, and nobody waits for the rest
                else:
                    self._start()
            elif self._held_bytes > MAX_HELD:
                exchange.abort(Failure.MALFORMED, f"{MAX_HELD} bytes without content")

    def _end(self) -> None:
        """Decode's answer is over. Ends the client's in the same write as the last bytes."""
        self._over = True
        if self._pumping is not None:
            self._pumping.leave()  # with all that it has of the reply
        if self._keeping is not None:
            return
        exchange, responder, stream = self._exchange, self._responder, self._filter
        responder.on_pause = responder.on_resume = None
        tail = self._last + stream.flush()
        ending = stream.ending(complete=exchange.complete, aborted=responder.gone)
        self._record.ended(ending)
        if responder.gone:
            self._status = CLIENT_LEFT
            return
        if not responder.started:
            if ending is not Ending.CLEAN:
                detail = "it ended the stream without an answer"
                self._failure = exchange.failure or LegFailed(
                    "decode", ending.value, errors.upstream_failed("decode", detail)
                )
                return
            self._start()
        if ending is Ending.CLEAN:
            if self._keep_handle():
                self._judged, self._last = True, tail
                return
            responder.end(tail)
            return
        self._status = 502
        if ending is not Ending.ERROR_EVENT:
            lost = errors.upstream_failed("decode", "it ended the stream before the answer was complete")
            # Clients stop at the end that the engine claims, and would never see what comes behind it.
            tail = b"".join([event for event in split_events(tail) if not self._dialect.read([event]).done])
            tail += self._dialect.error_event(lost.body())
        responder.end(tail, close=True)

    def _start(self) -> None:
        exchange = self._exchange
        self._record.first_content(self._prefilled_at)
        headers = [*relayed_headers(exchange, b"text/event-stream"), *self._own_headers]
        self._responder.begin_stream(200, headers, b"".join(self._held))
        self._held.clear()
        exchange.idle = self._idle
        if exchange.deadline != math.inf:  # not while reading is paused
            exchange.deadline = self._now() + self._idle
        writer = self._responder.framed_writer()
        if writer is not None:
            exchange.take_framed(self._filter.passer(writer))
            sink = self._responder.socket
            if sink is not None:
                self._pumping = exchange.pump_to(self._filter, sink)

    def _pause(self) -> None:
        exchange = self._exchange
        if exchange.deadline != math.inf:
            self._left = exchange.deadline - self._now()
        exchange.pause()

    def _resume(self) -> None:
        self._exchange.resume(self._now() + (self._idle if self._responder.started else self._left))

    def _keep_handle(self) -> bool:
        """Keep the handle, once; whether that is still going on. Without [DONE] only the end of the body makes the
        stream clean."""
        if self._keep is None or self._responder.gone:
            return False
        if self._filter.ending(complete=self._exchange.complete) is Ending.CLEAN:
            keep, self._keep = self._keep, None
            seen = self._filter
            self._keeping = keep(seen.handle, seen.reply(), seen.response_id, seen.calls_tools)
            if self._keeping is not None:
                self._keeping.add_done_callback(lambda _: self._kept())
        return self._keeping is not None

    def _kept(self) -> None:
        """The handle is where the next turn looks for it: what was held back may go. Harmless a second time."""
        if self._keeping is None:
            return
        self._keeping = None
        if self._judged:
            self._responder.end(self._last)
        elif self._over:
            self._end()
        else:
            held, self._last = self._last, b""
            self._pass_on(held)


def _whole_ending(answer: Transcript) -> Ending:
    if answer.error is not None:
        return Ending.ERROR_EVENT
    if not answer.finished:
        return Ending.TRUNCATED
    if "error" in answer.finish_reasons:
        return Ending.ERROR_FINISH
    return Ending.ABORTED if "abort" in answer.finish_reasons else Ending.CLEAN
