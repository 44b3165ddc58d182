"""What became of the handles that a prefill engine was sent: are blocks read, or does everything only look well?

An engine that never reads answers 200 to every turn and computes it all (EN-12). Only its own reports tell, and only
per engine: over the whole fleet one that never reads is hidden by those that do. Pure.
"""

from __future__ import annotations

from enum import StrEnum

from pd_wire.report import Report


class Pull(StrEnum):
    """One prefill with a handle; a metric label."""

    PULLED = "pulled"
    NOTHING = "nothing"
    """Nothing was read: it was in prefill's own cache, or below the engine's threshold, or reads are not configured."""
    UNPROVEN = "unproven"
    """Not one block held the tokens of the prompt."""
    FAILED = "failed"
    UNKNOWN = "unknown"
    """No report: vLLM's own connector gives none."""


def pull_of(report: Report | None) -> Pull:
    """What prefill's report says about the handle that it was given."""
    if report is None:
        return Pull.UNKNOWN
    if report.read_failed:
        return Pull.FAILED
    if report.pulled_tokens > 0:
        return Pull.PULLED
    return Pull.NOTHING if report.proven_tokens > 0 else Pull.UNPROVEN
