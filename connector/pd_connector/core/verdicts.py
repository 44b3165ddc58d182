"""The self-test's results and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried. ``fault`` is what is wrong and what to change, or ``None``."""

    name: str
    detail: str = ""
    fault: str | None = None


def lines(checks: Sequence[Check]) -> list[str]:
    """One line per check, and a last line with the result."""
    width = max((len(check.name) for check in checks), default=0)
    shown = [
        f"{'FAIL' if check.fault else 'ok  '}  {check.name:<{width}}  {check.fault or check.detail}" for check in checks
    ]
    faults = sum(check.fault is not None for check in checks)
    result = f"{faults} of {len(checks)} checks failed" if faults else f"all {len(checks)} checks passed"
    return [*shown, f"self-test: {result}"]
