"""How a process ended, in words, and which line of its log says why.

Separate from the supervisor because the wording is what a user acts on, and because it is tested on recorded logs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SHOWN_LINES: Final = 25
_SIGNALS: Final = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
_EXCEPTION: Final = re.compile(r"\b((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)): (\S.*)$")
_REFUSAL: Final = re.compile(r"^(?:pd-router|usage|\S+: error): \S")
_SECOND_HAND: Final = ("Engine core initialization failed", "Engine core proc", "EngineCore encountered an issue")
"""What vLLM's outer process says about an error that its inner one has explained already."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a process: an exit code, or the number of the signal that ended it."""

    code: int | None = None
    signal: int | None = None

    @classmethod
    def from_returncode(cls, returncode: int) -> Exit:
        """From the convention of `subprocess`: negative means a signal."""
        return cls(signal=-returncode) if returncode < 0 else cls(code=returncode)

    def __str__(self) -> str:
        if self.signal is not None:
            return f"was ended by {_SIGNALS.get(self.signal, f'signal {self.signal}')}"
        return f"exited with code {self.code}"


def cause_line(tail: Sequence[str]) -> str | None:
    """The line that best explains an exit: the last exception that isn't second-hand, or a program's refusal."""
    second_hand = None
    for line in reversed(tail):
        found = _EXCEPTION.search(line)
        if found and any(text in found.group(2) for text in _SECOND_HAND):
            second_hand = second_hand or found.group(0)
        elif found:
            return found.group(0)
        elif _REFUSAL.match(line) and not line.startswith("usage"):
            return line.strip()
    return second_hand


def exit_report(name: str, what: str, tail: Sequence[str], log: str) -> str:
    """Several lines for a terminal: who, how, why, the last lines of the log and where the rest is."""
    cause = cause_line(tail)
    lines = [f"{name} {what}" + (f": {cause}" if cause else "")]
    shown = [line for line in tail if line.strip()][-SHOWN_LINES:]
    if shown:
        lines.append(f"the last lines of its log ({log}):")
        lines += [f"  {line}" for line in shown]
    else:
        lines.append(f"it wrote nothing to its log ({log})")
    return "\n".join(lines)
