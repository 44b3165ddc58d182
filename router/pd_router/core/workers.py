"""Several processes that are one router: what each gets of its limits, and when one that ended is started again.

Separate from the supervisor, which starts and watches them, so that the arithmetic can be tested without processes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Final

from pd_router.core.addresses import Endpoint
from pd_router.core.settings import Settings

WORKER_VARIABLE: Final = "PD_ROUTER_WORKER"
"""In the environment of a process that a supervisor started: how to join it, see `Joining`."""
FIRST_DELAY: Final = 0.1
MAX_DELAY: Final = 10.0
STEADY: Final = 60.0
"""A worker that lived so long had no trouble with starting; the next one is not made to wait for the ones before."""


@dataclass(frozen=True, slots=True)
class Joining:
    """What a worker is told when it is started, besides the command line."""

    index: int
    descriptor: int
    """Its end of the socket pair."""
    parent: int
    """Process id of the supervisor."""
    port: int
    """That all workers listen on."""
    replaces: bool
    """Others serve already, so it listens only when it can, too."""

    def written(self) -> str:
        """For the environment."""
        return ":".join(str(int(value)) for value in astuple(self))

    @classmethod
    def read(cls, text: str) -> Joining:
        """What `written` wrote."""
        index, descriptor, parent, port, replaces = map(int, text.split(":"))
        return cls(index, descriptor, parent, port, bool(replaces))


def share_of(settings: Settings, port: int) -> Settings:
    """What one worker works with: an equal part of the router's places, rounded up.

    Divided because a place is taken and given back by every turn. What belongs to a tenant is counted for all workers
    in one place instead: a client with one connection is served by one worker, and would get a fraction of its limit.

    Args:
        port: that all workers listen on.
    """
    limits, count = settings.limits, settings.workers
    return replace(
        settings,
        listen=Endpoint(settings.listen.host, port),
        limits=replace(
            limits,
            max_inflight=-(-limits.max_inflight // count),
            max_queue=-(-limits.max_queue // count),
        ),
    )


@dataclass(slots=True)
class Backoff:
    """How long to wait before a worker is started again, in seconds."""

    failures: int = 0

    def ended(self, lived: float) -> float:
        """A worker ended by itself after so many seconds; returns the wait."""
        self.failures = 1 if lived >= STEADY else self.failures + 1
        return min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(self.failures - 1, 16))
