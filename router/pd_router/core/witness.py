"""Is a handle that another router left of the very process that this router talks to?

Separate from the fleet because it is the whole of what replaces a purge where several routers share a store: nobody
scans it for a dead process's handles, each reader refuses them instead. Two kinds of evidence, and both must hold:

* Identity: reader and writer know the holder by the same name. For a pod it is its uid and one start of its container,
  as the kubelet reports them; for an engine with an address, the address that answered.
* Continuity: the turn that left the handle was sent when the reader's connection to the holder already stood, and it
  has stood since. Only a pod whose process the kubelet names may do without it for what came before the reader's first
  connection; what the kubelet says may be late, so after a break continuity counts for pods, too.

The moment of sending counts, not the answer's: an answer may be read to its end after its process is gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Witness:
    """What one router knows of one engine's process. Times are the router's monotonic seconds."""

    identity: str = ""
    vouched: bool = False
    """The identity names one process, not just a place where one runs."""
    since: float = math.inf
    """Handles of turns that were sent before are refused."""

    @classmethod
    def of_pod(cls, uid: str, process: str) -> Witness:
        """For a pod; `process` is "" while the kubelet names none."""
        return cls(f"{uid}/{process}", vouched=process != "")

    def identify(self, uid: str, process: str) -> None:
        """The kubelet names another process, or none; the connection's break is told apart from that."""
        self.identity = f"{uid}/{process}"

    def connected(self, peer: str, now: float) -> None:
        """A connection stands. The first one to a vouched process is evidence of nothing that is not known."""
        self.since = -math.inf if self.vouched else now
        self.vouched = False
        if "/" not in self.identity:
            self.identity = peer

    def broken(self) -> None:
        """From here on the process may be another one, and until a connection stands nobody knows."""
        self.vouched = False
        self.since = math.inf

    def knows(self, identity: str, sent: float) -> bool:
        """Whether a handle may be used whose turn was sent at `sent`, to what its router calls `identity`."""
        return identity != "" and identity == self.identity and sent >= self.since
