"""The numbers that a decode engine tells about the blocks of finished turns, and when it tells them.

vLLM passes what its scheduler tells after a step to the process that serves `/metrics`, as lists that it may join on
the way. A number that did not change is not sent: steps are many, and changes few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Number:
    """One metric. `total`: a counter, sent as what was added; otherwise a gauge, sent as it is."""

    name: str
    meaning: str
    total: bool = False


NUMBERS: Final[Mapping[str, Number]] = {
    "pinned_blocks": Number(
        "vllm:pd_pinned_blocks", "Blocks of finished turns that vLLM keeps until a read or a timer."
    ),
    "readable_blocks": Number(
        "vllm:pd_readable_blocks", "Blocks of finished turns that are intact and that were given back to the pool."
    ),
    "handed_over_blocks": Number(
        "vllm:pd_handed_over_blocks", "Such blocks that went to another request or with a reset.", total=True
    ),
    "leases": Number("vllm:pd_leases", "Leases that are held."),
    "leased_blocks": Number("vllm:pd_leased_blocks", "Blocks that leases hold, each counted once."),
    "lease_cap_blocks": Number("vllm:pd_lease_cap_blocks", "Most blocks that leases may hold."),
    "leases_granted": Number("vllm:pd_leases_granted", "Finished turns that got a lease.", total=True),
    "leases_refused": Number(
        "vllm:pd_leases_refused",
        "Finished turns that got none: prolonged leases hold the cap, or requests need the blocks.",
        total=True,
    ),
    "leases_displaced": Number(
        "vllm:pd_leases_displaced", "Leases that gave way to a newer one, because the cap was reached.", total=True
    ),
    "leases_reclaimed": Number(
        "vllm:pd_leases_reclaimed", "Leases that ended early because a request needed their blocks.", total=True
    ),
}
"""By the key under which the engine counts. Prometheus appends `_total` to the names of counters."""


class Changes:
    """What to tell, given what was told before."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def of(self, counts: Mapping[str, int]) -> dict[str, list[int]]:
        """The numbers to send; empty when nothing has changed."""
        sent = {}
        for key, value in counts.items():
            before = self._told.get(key)
            if value != before:
                sent[key] = [value - (before or 0) if NUMBERS[key].total else value]
        self._told.update(counts)
        return sent
