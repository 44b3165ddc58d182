"""A holder's promise to keep a finished turn's blocks for a while, as it stands in the handle under ``pd_lease``.

With retention Leased a turn's blocks stay out of the pool's reach until the promise ends; afterwards they are as with
Unpinned, so the handle stays good as long as its moment proves the blocks intact. Whoever knows the token may prolong
the promise or end it, and nobody else can: it is drawn per turn and told to the router only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

TOKEN_DIGITS: Final = 32
MAX_SECONDS: Final = 3600
"""Longest time from now that a holder promises or prolongs."""
DEFAULT_SECONDS: Final = 60
"""For which a holder promises where nobody says otherwise."""
DEFAULT_SHARE: Final = 0.5
"""Of all blocks that promises may hold, likewise."""
MAX_BATCH: Final = 1024
"""Leases in one request to a holder."""
_FORM: Final = re.compile(rf"([0-9a-f]{{{TOKEN_DIGITS}}})-([1-9][0-9]{{0,3}})")


@dataclass(frozen=True, slots=True)
class Lease:
    """The promise named ``token`` (32 hexadecimal digits) holds for ``seconds`` from the end of its turn."""

    token: str
    seconds: int

    def __str__(self) -> str:
        return f"{self.token}-{self.seconds}"


def parse(value: Any) -> Lease | None:
    """Read what stands under ``pd_lease``; ``None`` when it is not one. Never raises."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[2]) > MAX_SECONDS:
        return None
    return Lease(match[1], int(match[2]))
