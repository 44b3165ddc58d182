"""One end of the socket pair between the supervisor and a worker: questions, answers and news in both directions.

Separate from what is said over it. Answers come in the order of the questions, so a question needs no number, and an
answer that nobody waits for any more is dropped when it comes. A socket pair has no path: nobody else can connect, and
nothing is left behind, however a process ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pd_router.core.worker_wire import Kind, Message, Reader, write

log = logging.getLogger("pd_router.workers")

Answer = tuple[Sequence[Any], bytes]
"""Values, and bytes."""


class ChannelError(Exception):
    """There is no answer: the other process is gone, or could not find one."""


class Channel(asyncio.Protocol):
    """One end. Make it with `join`.

    Args:
        handle: called with verb, arguments and bytes; what it returns answers a question.
        on_lost: the other end is gone.
    """

    def __init__(self, handle: Callable[[str, list[Any], bytes], Answer | None], on_lost: Callable[[], None]) -> None:
        self._handle = handle
        self._on_lost = on_lost
        self._reader = Reader()
        self._held = b""
        self._asked: deque[tuple[float, asyncio.Future[Message]]] = deque()
        self.on_late: Callable[[], None] = _nothing
        """Called when an answer came that nobody waited for any more."""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()

    @classmethod
    async def join(
        cls,
        sock: socket.socket,
        handle: Callable[[str, list[Any], bytes], Answer | None],
        on_lost: Callable[[], None],
    ) -> Channel:
        """Over one socket of a pair, which belongs to the channel from here on."""
        channel = cls(handle, on_lost)
        await channel._loop.create_unix_connection(lambda: channel, sock=sock)
        return channel

    def ask(self, verb: str, *arguments: Any, raw: bytes = b"") -> asyncio.Future[Message]:
        """Send a question. The future fails with `ChannelError`; one that is cancelled is answered all the same."""
        answer: asyncio.Future[Message] = self._loop.create_future()
        if self._transport is None:
            answer.set_exception(ChannelError("the other process is gone"))
            return answer
        self._asked.append((self._loop.time(), answer))
        self._send(write(Kind.ASK, [verb, *arguments], raw))
        return answer

    def give_up(self, before: float) -> bool:
        """Fail the questions that were asked before a time of the loop. Returns whether there were any.

        One look at all of them from time to time: a timer for each would cost a turn more than the question.
        """
        found = False
        for asked, answer in self._asked:
            if asked >= before:
                break
            if not answer.done():
                answer.set_exception(ChannelError("no answer in time"))
                found = True
        return found

    def tell(self, verb: str, *arguments: Any) -> None:
        """Send news. Dropped when the other end is gone."""
        if self._transport is not None:
            self._send(write(Kind.TELL, [verb, *arguments]))

    def tell_later(self, verb: str, *arguments: Any) -> None:
        """Send news with what is sent next, or by `flush`: the other end is not woken for them."""
        if self._transport is not None:
            self._held += write(Kind.TELL, [verb, *arguments])

    def flush(self) -> None:
        """Send what is held."""
        if self._held and self._transport is not None:
            self._send(b"")

    def _send(self, data: bytes) -> None:
        assert self._transport is not None
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def close(self) -> None:
        """Let go of the socket, whatever is under way."""
        self._on_lost = _nothing
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """The same, and wait until it has happened."""
        self.close()
        await self._ended.wait()

    # -- what the loop calls -----------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._received(message)
        except ValueError:
            log.exception("the channel between supervisor and worker cannot be read")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        while self._asked:
            _, answer = self._asked.popleft()
            if not answer.done():
                answer.set_exception(ChannelError("the other process is gone"))
                answer.exception()  # whoever waits sees it; nobody waiting is no error
        self._ended.set()
        self._on_lost()

    def _received(self, message: Message) -> None:
        if message.kind in (Kind.ANSWER, Kind.FAILED):
            _, answer = self._asked.popleft()
            if answer.done():
                self.on_late()
                return
            if message.kind is Kind.FAILED:
                answer.set_exception(ChannelError("the other process could not answer"))
            else:
                answer.set_result(message)
            return
        verb, *arguments = message.words
        found: Answer | None = None
        try:
            found = self._handle(verb, arguments, message.raw)
        except Exception:
            # One request's fault must not end the channel of all.
            log.exception("%s failed", verb)
        if message.kind is Kind.ASK and self._transport is not None:
            kind, (words, raw) = (Kind.FAILED, ((), b"")) if found is None else (Kind.ANSWER, found)
            self._send(write(kind, words, raw))


def _nothing() -> None:
    pass
