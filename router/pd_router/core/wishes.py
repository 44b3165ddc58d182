"""What a client says of its conversation in headers: this turn is the last, or keep what it leaves for so long.

Separate from the body's fields because these are about what comes after the turn, change nothing of it, and are the
router's alone: no engine sees them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from pd_router.core.errors import bad_field
from pd_wire.lease import MAX_SECONDS

END: Final = "X-Conversation-End"
HOLD: Final = "X-Conversation-Hold"
_END, _HOLD = END.lower(), HOLD.lower()
HEADERS: Final = frozenset({_END, _HOLD})
"""In lower case, as `read_wish` takes them."""
_SPACE: Final = " \t"
_SECONDS: Final = re.compile(r"[0-9]{1,4}")


class Wish(NamedTuple):
    """`end`: no turn follows this one. `hold`: seconds for which decode is to keep it, None where nothing is said."""

    end: bool = False
    hold: int | None = None


NO_WISH: Final = Wish()


def read_wish(headers: Mapping[str, str]) -> Wish:
    """Headers with lower-case names. Raises ApiError 400, naming the header and what is allowed."""
    if _END not in headers and _HOLD not in headers:
        return NO_WISH
    said = headers.get(_END, "false").strip(_SPACE).lower()
    if said not in ("true", "false"):
        raise bad_field(END, "true or false")
    hold = headers.get(_HOLD)
    if hold is None:
        return Wish(said == "true")
    hold = hold.strip(_SPACE)
    if not _SECONDS.fullmatch(hold) or int(hold) > MAX_SECONDS:
        raise bad_field(HOLD, f"a whole number of seconds from 0 to {MAX_SECONDS}")
    return Wish(said == "true", int(hold))
