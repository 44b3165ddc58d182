"""Which of a finished turn's blocks still hold its KV, although nothing keeps them.

A block that went back to the pool keeps its bytes until the pool hands it to another request. Each such hand-over takes
the next number, and the number becomes the block's stamp. A block is intact as long as its stamp is not above the count
that the pool had reached when the turn ended.

The stamp must be set before anybody can write: vLLM calls back while it plans a step, the write belongs to the step.
Whoever has read a block and *then* learns that its stamp is old has therefore read what the turn left there. Asking
before the read saves useless reads and proves nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pd_wire.moment import Moment


class Stamps:
    """One number per block. Written by the scheduler's thread only; another thread may read meanwhile."""

    def __init__(self, blocks: int, epoch: str) -> None:
        self._stamps = array("Q", bytes(8 * blocks))
        self._epoch = epoch
        self._count = 0

    @property
    def now(self) -> Moment:
        """What a turn that ends now writes into its handle."""
        return Moment(self._epoch, self._count)

    def handed_over(self, block: int) -> None:
        """The pool gives this block to another request."""
        self._count += 1
        self._stamps[block] = self._count

    def renew(self, epoch: str) -> None:
        """Nothing of what was promised before holds any more. Counts go on: a reader may be between the two lines."""
        self._epoch = epoch

    def intact(self, moment: Moment, blocks: Sequence[int]) -> int:
        """How many of the leading ``blocks`` still hold what they held at ``moment``.

        Returns:
            0 to ``len(blocks)``; 0 for another epoch. An unknown block number ends the count.
        """
        stamps, limit, total = self._stamps, moment.count, len(self._stamps)
        good = 0
        for block in blocks:
            if not 0 <= block < total or stamps[block] > limit:
                break
            good += 1
        # Last, so that an answer is never a mixture of two epochs.
        return good if moment.epoch == self._epoch else 0
