"""What P tells the router about a handle that it was given, under ``pd_report`` in P's own answer.

Decode's ``usage`` says that the whole prompt was cached, and a load that was skipped looks like one that happened; only
the reader knows. The router strips the report, counts it and shows it, and never lets it reach a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

READ_FAILED: Final = "the read failed"
"""Reason of a report: P began to read and could not, and has computed everything itself."""


class Verdict(StrEnum):
    """How far the handle got on P; the order is the funnel's."""

    MALFORMED = "malformed"
    UNPROVEN = "unproven"
    """No proof, an unreadable proof, or no block matched."""
    TRIMMED = "trimmed"
    """Some leading blocks matched and the rest was cut off."""
    PROVEN = "proven"
    """Every whole block of the handle matched, or as many as the prompt is long."""


@dataclass(frozen=True, slots=True)
class Report:
    """Counts are in tokens. ``pulled`` + ``local`` + computed = prompt."""

    verdict: Verdict
    reason: str
    proven_tokens: int
    local_tokens: int
    pulled_tokens: int
    gone_tokens: int = 0
    """Proven, and not read because the holder had given their blocks to another request."""
    wasted_tokens: int = 0
    """Read, and computed again because the holder gave their blocks away during the read."""

    @property
    def read_failed(self) -> bool:
        """Whether P tried to read the holder's blocks in vain."""
        return self.reason == READ_FAILED

    def as_json(self) -> dict[str, Any]:
        """The JSON value that goes under ``pd_report``."""
        return {
            "verdict": self.verdict.value,
            "reason": self.reason,
            "proven_tokens": self.proven_tokens,
            "local_tokens": self.local_tokens,
            "pulled_tokens": self.pulled_tokens,
            "gone_tokens": self.gone_tokens,
            "wasted_tokens": self.wasted_tokens,
        }


def parse(value: Any) -> Report | None:
    """Read a report, or ``None`` when there is none or it is not ours. Unknown is not zero."""
    if not isinstance(value, Mapping):
        return None
    try:
        return Report(
            Verdict(value["verdict"]),
            str(value["reason"]),
            int(value["proven_tokens"]),
            int(value["local_tokens"]),
            int(value["pulled_tokens"]),
            # An engine of an earlier release does not say.
            int(value.get("gone_tokens", 0)),
            int(value.get("wasted_tokens", 0)),
        )
    except (KeyError, TypeError, ValueError):
        return None
