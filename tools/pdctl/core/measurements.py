"""From single turns to figures per prompt length, and to the list of what is wrong with them.

Three quantities, from three places: TTFT from the client, prefill duration from the router, pulled tokens and transfer
time from P, since transfers are counted by the side that reads. Averages never mix turn 1, which is cold in both legs,
with the rest. A figure that nobody reported is None, and None is a finding, never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any, Final

SHOWN_FINDINGS: Final = 12


class Leg(StrEnum):
    """One of the two runs that differ in `kvTransfer.bidirectional` alone."""

    OFF = "off"
    ON = "on"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of one conversation. Times in milliseconds; turns and conversations count from 1.

    ``reported_tokens`` is what P's connector told the router, ``pulled_tokens`` what P's own counter says.
    """

    leg: Leg
    conversation: int
    turn: int
    request_id: str
    prompt_tokens: int | None
    reply_tokens: int | None
    ttft_ms: float | None
    prefill_ms: float | None
    pulled_tokens: int | None
    reported_tokens: int | None
    transfer_ms: float | None
    ending: str | None

    def as_json(self) -> dict[str, Any]:
        """For the file of raw records."""
        return {**asdict(self), "leg": self.leg.value}


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians over the conversations of one leg at one turn; ``ttft_span`` is the fastest and the slowest."""

    ttft_ms: float
    ttft_span: tuple[float, float]
    prefill_ms: float
    pulled_tokens: float
    transfer_ms: float

    @property
    def compute_ms(self) -> float:
        """Prefill without the transfer."""
        return max(0.0, self.prefill_ms - self.transfer_ms)


@dataclass(frozen=True, slots=True)
class Row:
    """One turn in both legs."""

    turn: int
    prompt_tokens: int
    off: Figures
    on: Figures

    @property
    def ttft_ratio(self) -> float:
        """How many times shorter the TTFT is with reuse."""
        return self.off.ttft_ms / self.on.ttft_ms

    @property
    def prefill_ratio(self) -> float:
        """How many times shorter the prefill is with reuse."""
        return self.off.prefill_ms / self.on.prefill_ms

    def as_json(self) -> dict[str, Any]:
        """For the file of records."""
        return {**asdict(self), "ttft_ratio": self.ttft_ratio, "prefill_ratio": self.prefill_ratio}


def find_faults(records: Sequence[TurnRecord], conversations: int, turns: int, reply_tokens: int) -> list[str]:
    """Why the figures may not be trusted; empty when they may. Speed is a result and never a fault."""
    faults = []
    for leg in Leg:
        found = {(record.conversation, record.turn) for record in records if record.leg is leg}
        missing = conversations * turns - len(found)
        if missing:
            faults.append(f"reuse {leg.name}: {missing} of {conversations * turns} turns are missing")
    for record in records:
        faults += [f"{_name(record)}: {fault}" for fault in _record_faults(record, reply_tokens)]
    for turn in range(1, turns + 1):
        lengths = {record.prompt_tokens for record in records if record.turn == turn} - {None}
        if len(lengths) > 1:
            shown = ", ".join(str(length) for length in sorted(filter(None, lengths)))
            faults.append(f"turn {turn}: prompts of {shown} tokens can't be compared")
    return faults


def summarise(records: Sequence[TurnRecord]) -> list[Row]:
    """One row per turn, in order. Only for records without faults.

    Raises:
        ValueError: a figure is missing.
    """
    rows = []
    for turn in sorted({record.turn for record in records}):
        here = [record for record in records if record.turn == turn]
        off, on = (_figures([record for record in here if record.leg is leg]) for leg in Leg)
        rows.append(Row(turn, int(_median(here, lambda record: record.prompt_tokens)), off, on))
    return rows


def _figures(records: Sequence[TurnRecord]) -> Figures:
    ttft = [record.ttft_ms for record in records if record.ttft_ms is not None]
    return Figures(
        ttft_ms=_median(records, lambda record: record.ttft_ms),
        ttft_span=(min(ttft), max(ttft)),
        prefill_ms=_median(records, lambda record: record.prefill_ms),
        pulled_tokens=_median(records, lambda record: record.pulled_tokens),
        transfer_ms=_median(records, lambda record: record.transfer_ms),
    )


def _median(records: Sequence[TurnRecord], figure: Callable[[TurnRecord], float | None]) -> float:
    values = [value for record in records if (value := figure(record)) is not None]
    if not values or len(values) < len(records):
        raise ValueError("a figure is missing")
    return float(median(values))


def _record_faults(record: TurnRecord, reply_tokens: int) -> list[str]:
    faults = [
        f"no {what} from {source}"
        for what, source, value in (
            ("prompt length", "the answer's usage", record.prompt_tokens),
            ("TTFT", "the client", record.ttft_ms),
            ("prefill duration", "the router", record.prefill_ms),
            ("pulled tokens", "P's metrics", record.pulled_tokens),
            ("transfer time", "P's metrics", record.transfer_ms),
        )
        if value is None
    ]
    if record.ending != "length" or record.reply_tokens != reply_tokens:
        faults.append(f"the reply ended with {record.ending} after {record.reply_tokens} of {reply_tokens} tokens")
    pulled = record.pulled_tokens
    if pulled is None:
        return faults
    expected = record.leg is Leg.ON and record.turn > 1
    if expected and pulled == 0:
        faults.append("P pulled nothing from D")
    if not expected and pulled > 0:
        faults.append(f"P pulled {pulled} tokens although there was nothing to reuse")
    if expected and pulled > 0 and record.reported_tokens != pulled:
        faults.append(f"P's connector reported {record.reported_tokens} pulled tokens, P's counter says {pulled}")
    if expected and pulled > 0 and record.transfer_ms == 0:
        faults.append("P pulled tokens, but its transfer time didn't move")
    return faults


def _name(record: TurnRecord) -> str:
    return f"reuse {record.leg.name}, conversation {record.conversation}, turn {record.turn}"
