"""Drive a router with wrk and return what wrk saw.

Separate from the measurement so that the load (and what counts as a good answer) can be read in one place.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from perf.errors import PerfError

_SCRIPT: Final = Path(__file__).with_name("turns.lua")
_MARK: Final = "RESULT "


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent: by default 12.5 KB of prompt for 64 tokens, round 500 conversations."""

    conversations: int = 500
    words: int = 2500
    """Of five bytes each."""
    tokens: int = 64
    connections: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of wrk."""

    turns: int
    received_bytes: int
    duration_s: float
    p50_ms: float
    p99_ms: float
    faults: dict[str, int]
    """Kinds of errors with their count; empty when every answer was complete and 2xx."""

    @property
    def turns_per_s(self) -> float:
        """Finished turns per second."""
        return self.turns / self.duration_s


@dataclass(slots=True)
class Load:
    """A generator on ``core`` that goes round the conversations, and goes on in the next run where it stopped."""

    shape: Shape
    core: int
    position: dict[str, int] = field(default_factory=dict)

    def run(self, url: str, seconds: int, connections: int | None = None) -> Outcome:
        """Send turns to ``url`` for ``seconds``, so many at one time (else as many as the shape says).

        Raises:
            PerfError: when wrk fails or says nothing.
        """
        shape = self.shape
        position = self.position.get(url, 0)
        result = subprocess.run(
            [
                "taskset",
                "-c",
                str(self.core),
                "wrk",
                "-t1",
                f"-c{connections or shape.connections}",
                f"-d{seconds}s",
                "--timeout",
                "20s",
            ]
            + ["-s", str(_SCRIPT), url, "--"]
            + [str(value) for value in (shape.conversations, shape.words, shape.tokens, position)],
            capture_output=True,
            text=True,
            check=False,
        )
        line = next((line for line in result.stdout.splitlines() if line.startswith(_MARK)), None)
        if result.returncode or line is None:
            raise PerfError(f"wrk failed ({result.returncode}): {result.stdout[-1000:]}{result.stderr[-1000:]}")
        outcome = parse_outcome(line.removeprefix(_MARK))
        self.position[url] = (position + outcome.turns) % shape.conversations
        return outcome


def parse_outcome(text: str) -> Outcome:
    """Read the line that the script prints."""
    raw = json.loads(text)
    faults = ("connect_errors", "read_errors", "write_errors", "timeouts", "bad_status")
    return Outcome(
        turns=raw["turns"],
        received_bytes=raw["bytes"],
        duration_s=raw["duration_us"] / 1e6,
        p50_ms=raw["p50_us"] / 1e3,
        p99_ms=raw["p99_us"] / 1e3,
        faults={name: raw[name] for name in faults if raw[name]},
    )
