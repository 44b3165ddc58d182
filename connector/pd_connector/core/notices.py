"""Notices that a read is over, for blocks that nobody kept.

vLLM's reader always sends the holder one, with the request id from the handle. A handle to unpinned blocks carries a
marked id, so that the holder can tell these from notices that end a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_MARK: Final = "pd-unpinned-"


def marked(request_id: str) -> str:
    """What stands in the handle instead of ``request_id``."""
    return _MARK + request_id


def without_unpinned(notices: Mapping[str, list[bytes]]) -> dict[str, list[bytes]]:
    """Notices by agent, without those that concern unpinned blocks."""
    mark = _MARK.encode()
    kept = {agent: [one for one in list_ if not one.startswith(mark)] for agent, list_ in notices.items()}
    return {agent: list_ for agent, list_ in kept.items() if list_}
