"""How many sockets this process may have, and how many of them clients may take.

Separate because running out is silent: libuv then accepts and closes at once, on the admin port too, so that a crowd of
idle clients would look like a dead router. Clients get a share, and what is left is for engines, probes and the admin
port.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable

log = logging.getLogger("pd_router.descriptors")

RESERVE = 128
"""For the admin port, probes, the API server, and what a process has open anyway."""
LOG_SECONDS = 60.0


def raise_limit() -> None:
    """Take as many descriptors as this process may; the usual soft limit of 1024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of %d descriptors cannot be raised to %d: %s", soft, hard, error)


def for_clients(limit: int, max_inflight: int) -> int:
    """Client connections that may be open under a limit of descriptors.

    Each turn needs two more: one to decode, while the one to prefill is still kept for the next.
    """
    left = limit - for_pump(limit, max_inflight)
    return max(1, left - min(2 * max_inflight + RESERVE, 2 * left // 3 + RESERVE // 4))


def for_pump(limit: int, max_inflight: int) -> int:
    """Descriptors that streams in the pump may have, two each: where these are scarce, such streams take the other
    way."""
    return min(2 * max_inflight, limit // 8)


def pumped_streams(max_inflight: int) -> int:
    """How many streams may be in the pump under this process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return for_pump(soft, max_inflight) // 2


class ClientShare:
    """The number of client connections that may be open, and a word in the log when there are no more."""

    def __init__(self, max_inflight: int, now: Callable[[], float]) -> None:
        self._max_inflight = max_inflight
        self._now = now
        self._logged: float | None = None

    def __call__(self) -> int:
        """How many. Read anew each time: the limit of a running process can be changed from outside."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return for_clients(soft, self._max_inflight)

    def refused(self) -> None:
        """A client was turned away. Says so once a minute."""
        now = self._now()
        if self._logged is None or now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning("client connections are refused: %d are open, as many as the descriptors allow", self())
