"""Keeping the handshake listener alive (IS-06).

vLLM's listener has no guard: one frame that does not decode, or names an unknown rank, ends its thread. From then on no
new peer can shake hands, while the engine looks healthy. The protocol stays vLLM's; only the end of the thread is ours.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from vllm.logger import init_logger

logger = init_logger("vllm.pd_connector")

RETRY_SECONDS: Final = 0.2
"""Pause before listening again, so that a port that is not free yet does not become a busy loop."""


def serve_handshakes(
    listen: Callable[..., None],
    encoded_data: Any,
    ready_event: threading.Event,
    stop_event: threading.Event,
    host: str,
    port: int,
) -> None:
    """Run ``listen`` until it returns by itself or ``stop_event`` is set; start it again when it raises."""
    while True:
        try:
            listen(encoded_data, ready_event, stop_event, host, port)
            return
        # The frame comes from the network, so any error may come with it.
        except Exception as error:
            if not ready_event.is_set():
                # It never listened: the port is taken, which no retry mends. vLLM waits for this event, and then
                # finds the thread ended: so nothing slow comes after it.
                logger.exception("The NIXL handshake listener could not start on %s:%s", host, port)
                ready_event.set()
                return
            logger.warning("A bad frame ended the NIXL handshake listener; listening again: %r", error)
        if stop_event.wait(RETRY_SECONDS):
            return
