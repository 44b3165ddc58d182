"""A moment in the life of a holder's block pool, as it stands in the handle under ``pd_moment``.

With retention Unpinned nothing keeps a finished turn's blocks: the pool may give each of them to another request. The
holder counts those hand-overs; a handle carries the count at the end of its turn, and the holder can say later which of
its blocks have been handed over since. A count means nothing after a restart or a cache reset, so it stands beside an
epoch that is drawn anew each time.

Text, not a number: JSON readers in between may turn numbers into floating point.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

EPOCH_DIGITS: Final = 16
MAX_COUNT: Final = (1 << 63) - 1
_FORM: Final = re.compile(rf"([0-9a-f]{{{EPOCH_DIGITS}}})-([0-9a-f]{{1,16}})")


@dataclass(frozen=True, slots=True)
class Moment:
    """``count`` hand-overs after the beginning of ``epoch`` (16 hexadecimal digits)."""

    epoch: str
    count: int

    def __str__(self) -> str:
        return f"{self.epoch}-{self.count:x}"


def parse(value: Any) -> Moment | None:
    """Read what stands under ``pd_moment``; ``None`` when it is not one. Never raises."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    count = int(match[2], 16)
    return Moment(match[1], count) if count <= MAX_COUNT else None
