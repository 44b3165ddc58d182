"""What to do with blocks that were read and turn out to have been overwritten meanwhile.

Everything behind the first bad block is worthless, because a block's KV depends on all tokens before it. vLLM computes
such blocks again when they are reported as load errors.
"""

from __future__ import annotations

from collections.abc import Sequence


def to_recompute(local: Sequence[int], asked: int, intact: int) -> set[int]:
    """The reader's blocks that must be computed again.

    Args:
        local: the reader's block numbers that were filled, in order.
        asked: how many of the holder's blocks were asked about. There are more of them than of ``local`` when the
            reader's own prefix cache had the first ones.
        intact: how many of the leading ones are intact.
    """
    own = asked - len(local)
    return set(local[max(0, intact - own) :])
