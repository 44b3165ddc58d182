"""The way of a stream's tokens past Python: who takes it, when, and what sends a stream back.

A token that differs from the one before it in plain letters only is most of what a router sees, and handing it to
Python and back to a socket is most of what it costs. `native/pump.c` does that for all streams of a loop; here is what
it may be given: streams between two plain sockets whose last token was judged and sent by `SseFilter` and `relay`.
Whatever is not such a token comes back to the connection's `data_received`, as if the loop had read it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from typing import TYPE_CHECKING, Any, Final, Protocol

from pd_router.core.sse import SseFilter
from pd_router.native import NotBuilt, load

if TYPE_CHECKING:
    from pd_router.shell.exchange import Pumping

log = logging.getLogger("pd_router.pump")

NONE: Final = (b"", b"")
MAX_DECLINED: Final = 6
"""Reads in a row that are for Python; a stream of these (logprobs, tool calls) is better off without the detour."""
_DECLINED, _SHORT, _ENDED = range(3)
_BATCH: Final = 64


class _Event(ctypes.Structure):
    _fields_ = (
        ("slot", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
    )


class _Taken(ctypes.Structure):
    _fields_ = (("letters", ctypes.c_void_p), ("size", ctypes.c_size_t), ("passed", ctypes.c_size_t))


class _Pump(ctypes.Structure):
    """The beginning of the library's own."""

    _fields_ = (("events", _Event * _BATCH), ("taken", _Taken))


class Source(Protocol):
    """What the pump asks of an engine's connection."""

    transport: asyncio.Transport | None
    between_chunks: bool
    pumping: Pumping | None

    def data_received(self, data: bytes) -> None:
        """Bytes from the engine."""

    def take_passer(self, stream: SseFilter, sink: asyncio.Transport) -> None:
        """Look for the stream's latest token from here on."""

    def close(self) -> None:
        """Drop the socket now."""


class Pump:
    """The streams of one loop that need no Python. Belongs to the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        """`most`: streams at one time; each has two descriptors. Raises NotBuilt."""
        library = self.library = load()
        at, text, size = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
        pointer = ctypes.POINTER(_Pump)
        for name, result, arguments in (
            ("new", pointer, ()),
            ("free", None, (pointer,)),
            ("fd", at, (pointer,)),
            ("adopt", at, (pointer, at, at, size)),
            ("tune", at, (pointer, at, text, size, text, size)),
            ("take", None, (pointer, at)),
            ("moved", at, (pointer, at)),
            ("release", None, (pointer, at)),
            ("run", at, (pointer,)),
        ):
            function = getattr(library, f"pump_{name}")
            function.restype, function.argtypes = result, arguments
        self.pump: Any = library.pump_new()
        if not self.pump:
            raise NotBuilt("the kernel gives it no memory or no descriptor")
        self._loop, self._most = loop, most
        self._fd = library.pump_fd(self.pump)
        self._events, self.taken = self.pump.contents.events, self.pump.contents.taken
        self._run_once = library.pump_run
        self.streams: dict[int, PumpedStream] = {}
        loop.add_reader(self._fd, self._run)

    def close(self) -> None:
        """Send all streams back."""
        for stream in list(self.streams.values()):
            stream.leave()
        self._loop.remove_reader(self._fd)
        self.library.pump_free(self.pump)

    def adopt(self, source: Source, stream: SseFilter, sink: asyncio.Transport) -> PumpedStream | None:
        """Take over a stream whose last token was written to `sink`. None when that can't be."""
        engine = source.transport
        if engine is None or engine.is_closing() or sink.is_closing() or sink.get_write_buffer_size():
            return None
        if len(self.streams) >= self._most:
            return None
        if sink.get_extra_info("sslcontext") is not None or engine.get_extra_info("sslcontext") is not None:
            return None
        up, down = engine.get_extra_info("socket"), sink.get_extra_info("socket")
        if up is None or down is None:
            return None
        slot = self.library.pump_adopt(self.pump, up.fileno(), down.fileno(), max(0, stream.room))
        if slot < 0:
            log.debug("a stream stays in Python: %s", os.strerror(-slot))
            return None
        made = self.streams[slot] = PumpedStream(self, slot, source, stream, sink)
        engine.pause_reading()
        made.tune()
        return None if made.left else made

    def _run(self) -> None:
        count = self._run_once(self.pump)
        if not count:
            return
        # All are copied before any is served: that may end other streams, and begin new ones in their slots.
        found = []
        for event in self._events[:count]:
            data = ctypes.string_at(event.data, event.size) if event.size else b""
            found.append((self.streams[event.slot], event.kind, data))
        for stream, kind, data in found:
            try:
                stream.serve(kind, data)
            except Exception:
                log.exception("a stream failed")
                stream.source.close()


class PumpedStream:
    """One stream in the pump, from its first token until it `left`."""

    __slots__ = ("_around", "_declined", "_pump", "_slot", "_stream", "left", "sink", "source")

    def __init__(self, pump: Pump, slot: int, source: Source, stream: SseFilter, sink: asyncio.Transport) -> None:
        self._pump, self._slot, self._stream = pump, slot, stream
        self.source, self.sink = source, sink
        self.left = False
        self._around = NONE
        self._declined = 0
        """Reads in a row that were for Python."""

    def leave(self) -> None:
        """Go back to the loop, with all that passed. Harmless a second time."""
        if self.left:
            return
        self._settle()
        self.left = True
        self._pump.library.pump_release(self._pump.pump, self._slot)
        del self._pump.streams[self._slot]
        self.source.pumping = None
        engine = self.source.transport
        if engine is not None and not engine.is_closing():
            engine.resume_reading()

    def moved(self) -> bool:
        """Whether anything passed since this was last asked."""
        return bool(self._pump.library.pump_moved(self._pump.pump, self._slot))

    def serve(self, kind: int, data: bytes) -> None:
        """Do what the library leaves to Python."""
        engine = self.source.transport
        if kind == _ENDED:
            self.leave()  # the loop reads once more, and finds out how it ended
        elif kind == _SHORT and self.left:
            self.sink.abort()  # something else was written where this belongs
        elif kind == _SHORT:
            self.leave()
            if not self.sink.is_closing():
                self.sink.write(data)
        elif self.left:
            if engine is not None and not engine.is_closing():
                self.source.data_received(data)
        else:
            self._settle()
            self.source.data_received(data)
            if not self.left:
                self._go_on()

    def _go_on(self) -> None:
        self._declined += 1
        if self._declined > MAX_DECLINED or self.sink.is_closing() or self.sink.get_write_buffer_size():
            self.leave()
        else:
            self.tune()

    def _settle(self) -> None:
        """Give the stream what passed."""
        taken = self._pump.taken
        self._pump.library.pump_take(self._pump.pump, self._slot)
        if taken.passed:
            self._declined = 0
            self._stream.keep_letters(ctypes.string_at(taken.letters, taken.size) if taken.size else b"", taken.passed)

    def tune(self) -> None:
        """Look for tokens like the last one; for none while a chunk or an event is half read."""
        stream = self._stream
        around = stream.last_token() if self.source.between_chunks else NONE
        if around != NONE and around != stream.token:
            self.source.take_passer(stream, self.sink)
        if around != self._around:
            self._around = around
            before, after = around
            library, pump = self._pump.library, self._pump.pump
            if library.pump_tune(pump, self._slot, before, len(before), after, len(after)):
                self.leave()  # no memory
