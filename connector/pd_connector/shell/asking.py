"""Asking a holder which of its blocks are intact, without holding up the engine.

Sockets live in a few threads. The engine's own threads wait for an answer only as long as one may reasonably take, and
look again later: a step of a busy prefill engine takes a hundred milliseconds, and an answer that comes within one
must not wait for the next. No answer means that nothing is intact.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Final

import zmq
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from pd_connector.core.question import Question, Unreadable, decode_answer

logger = init_logger("vllm.pd_connector")

THREADS: Final = 4
LIMIT_SECONDS: Final = 0.5
"""Longest time to wait for an answer: measured 0.5 ms, 7 ms at worst, on a busy holder."""
SILENCE_SECONDS: Final = 2.0
"""How long a holder that gave no answer is not asked again, so that it can't hold up questions to others."""
PEERS: Final = 128
"""Connections kept by each thread."""
PATIENCE_SECONDS: Final = 0.002
"""Longest time that an engine's thread waits within one step, for all requests together."""


class Patience:
    """The time that one step may spend waiting."""

    def __init__(self, seconds: float = PATIENCE_SECONDS) -> None:
        self._seconds = seconds
        self.left = seconds

    def renew(self) -> None:
        """A new step begins."""
        self.left = self._seconds


class Asked:
    """A question under way."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future
        self._deadline = time.monotonic() + LIMIT_SECONDS

    def intact(self, patience: Patience) -> int | None:
        """How many leading blocks are intact; ``None`` while that is not known and may still become known."""
        start = time.monotonic()
        try:
            return self._future.result(timeout=max(0.0, patience.left))
        except NotYet:
            return None if time.monotonic() < self._deadline else 0
        finally:
            patience.left -= time.monotonic() - start


class Asker:
    """Questions to any holder; one per process that asks."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pd-ask")
        self._context = zmq.Context()
        self._own = threading.local()
        self._silent: dict[str, float] = {}

    def ask(self, host: str, port: int, question: Question) -> Asked:
        """Send a question. What fails is answered with 0."""
        address = make_zmq_path("tcp", host, port)
        if self._silent.get(address, 0.0) > time.monotonic():
            return Asked(_nothing_intact())
        return Asked(self._threads.submit(self._answer, address, question))

    def _answer(self, address: str, question: Question) -> int:
        sockets: dict[str, Any] = self._own.__dict__
        try:
            if address not in sockets:
                if len(sockets) >= PEERS:
                    _close_all(sockets)
                sockets[address] = self._connect(address)
            sockets[address].send(question.encode())
            return decode_answer(sockets[address].recv(), len(question.blocks))
        # A holder that is gone is no fault of this engine: the blocks are computed again.
        except (zmq.ZMQError, Unreadable, ValueError) as error:
            logger.warning("%s did not say which of its blocks are intact: %r", address, error)
            self._silent[address] = time.monotonic() + SILENCE_SECONDS
            if address in sockets:
                sockets.pop(address).close(linger=0)
            return 0

    def _connect(self, address: str) -> Any:
        socket = self._context.socket(zmq.REQ)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            socket.setsockopt(option, int(LIMIT_SECONDS * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(address)
        return socket


def _nothing_intact() -> Future[int]:
    known: Future[int] = Future()
    known.set_result(0)
    return known


def _close_all(sockets: dict[str, Any]) -> None:
    while sockets:
        sockets.popitem()[1].close(linger=0)
