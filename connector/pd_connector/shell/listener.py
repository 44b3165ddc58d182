"""The side channel's listener: vLLM's handshakes, our messages, and nothing that could end it (IS-06).

vLLM's listener has no guard: one frame that does not decode, or names an unknown rank, ends its thread. From then on no
new peer can shake hands, while the engine looks healthy. The protocol of the handshake stays vLLM's and so does its
code; its socket is wrapped, so that it only ever sees frames that it can take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.logger import init_logger

from pd_connector.core.lease_message import is_change
from pd_connector.core.question import is_question

logger = init_logger("vllm.pd_connector")

RETRY_SECONDS: Final = 0.2
"""Pause before listening again, so that a port that is not free yet does not become a busy loop."""
MAX_MESSAGE: Final = 8 << 20
"""Bytes; a question about a million blocks is half of that."""

Answer = Callable[[bytes], bytes | None]


def serve(
    listen: FunctionType,
    answer: Answer,
    encoded_data: Any,
    ready_event: threading.Event,
    stop_event: threading.Event,
    host: str,
    port: int,
) -> None:
    """Run vLLM's ``listen`` until it returns by itself or ``stop_event`` is set; start it again when it raises.

    Args:
        listen: vLLM's listener.
        answer: answers our messages, ``None`` where a message deserves no answer.
        encoded_data: handshake metadata by rank.
        ready_event: set once the port is open, or can't be.
        stop_event: set when the engine stops.
        host: address to listen on.
        port: and its port.
    """
    guarded = _with_guarded_socket(listen, answer, encoded_data)
    while True:
        try:
            guarded(encoded_data, ready_event, stop_event, host, port)
            return
        # Frames come from the network, so any error may come with them, for all the guard does.
        except Exception as error:
            if not ready_event.is_set():
                # It never listened: the port is taken, which no retry mends. vLLM waits for this event, and then
                # finds the thread ended: so nothing slow comes after it.
                logger.exception("The NIXL handshake listener could not start on %s:%s", host, port)
                ready_event.set()
                return
            logger.warning("The NIXL handshake listener ended; listening again: %r", error)
        if stop_event.wait(RETRY_SECONDS):
            return


def _with_guarded_socket(listen: FunctionType, answer: Answer, ranks: Any) -> Callable[..., None]:
    """The same code, with a ``zmq_ctx`` that makes a guarded socket."""

    @contextmanager
    def guarded(socket_type: Any, address: str) -> Iterator[Any]:
        context = zmq.Context()
        try:
            socket = context.socket(socket_type)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)  # holds for what is bound afterwards
            socket.setsockopt(zmq.IPV6, 1)
            socket.bind(address)
            yield _GuardedSocket(socket, answer, ranks)
        finally:
            context.destroy(linger=0)

    return FunctionType(listen.__code__, {**listen.__globals__, "zmq_ctx": guarded}, listen.__name__)


class _GuardedSocket:
    """A router socket whose reader gets handshakes of known ranks only; everything else is dealt with here."""

    def __init__(self, socket: Any, answer: Answer, ranks: Any) -> None:
        self._socket, self._answer, self._ranks = socket, answer, ranks
        self._told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv_multipart(self) -> list[bytes]:
        """The next handshake.

        Raises:
            zmq.Again: when something else came, or nothing; the reader then looks whether it is to stop.
        """
        frames: list[bytes] = self._socket.recv_multipart()
        if len(frames) == 3 and not frames[1] and (is_question(frames[2]) or is_change(frames[2])):
            reply = self._answer(frames[2])
            if reply is not None:
                self._socket.send_multipart((frames[0], b"", reply))
                raise zmq.Again
        elif len(frames) == 3 and _is_handshake(frames[2], self._ranks):
            return frames
        if not self._told:
            # Once: whoever floods the port shall not fill the log as well.
            self._told = True
            logger.warning("Ignored a message on the NIXL side channel that is no handshake of this engine's ranks")
        raise zmq.Again


def _is_handshake(message: bytes, ranks: Any) -> bool:
    try:
        kind, pipeline_rank, tensor_rank = msgspec.msgpack.decode(message)
        return kind == GET_META_MSG and (pipeline_rank, tensor_rank) in ranks
    # msgspec's own errors, a wrong number of items, values that can't be hashed.
    except (msgspec.MsgspecError, ValueError, TypeError):
        return False
