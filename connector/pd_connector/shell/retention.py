"""Unpinned retention on the holder: a finished turn's blocks go back to the pool and can still be read.

vLLM's own way keeps every finished turn's blocks until they are read or a timer ends; while they are kept the engine
admits nothing into them. Here they return to the end of the pool's free queue at once, so that they are the last to be
taken, and `core.stamps` notes when one is.

Runs in the scheduler's thread, except `answer`, which the side channel's thread calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from vllm.logger import init_logger

from pd_connector.core.question import Unreadable, decode, encode_answer
from pd_connector.core.stamps import Stamps
from pd_wire.moment import EPOCH_DIGITS, Moment

logger = init_logger("vllm.pd_connector")


class UnpinnedRetention:
    """One engine's, or data-parallel rank's."""

    def __init__(self, pool: Any, engine_id: str, steps_under_way: int) -> None:
        """
        Args:
            pool: vLLM's `BlockPool`.
            engine_id: questions for any other engine are not answered.
            steps_under_way: steps that may still run when a request ends; until they have, its blocks stay
                referenced, since the last of them may still write behind the last token.
        """
        self._pool = pool
        self._engine_id = engine_id
        self._steps = steps_under_way
        self._stamps = Stamps(pool.num_gpu_blocks, _draw_epoch())
        self._waiting: list[tuple[int, list[Any]]] = []
        self._step = 0

    @property
    def pending(self) -> bool:
        """Blocks wait for their last step to end; an idle engine has to take it."""
        return bool(self._waiting)

    def keep_readable(self, block_ids: Sequence[int]) -> Moment:
        """Hold a finished turn's blocks until they can be given back with a watch on each.

        To be called before vLLM frees them. Returns what the handle has to carry.
        """
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._waiting.append((self._step + self._steps, blocks))
        return self._stamps.now

    def end_step(self) -> None:
        """A step is planned: give back what was waiting for it. The turn's last blocks are taken first."""
        while self._waiting and self._waiting[0][0] <= self._step:
            _, blocks = self._waiting.pop(0)
            self._pool.unpin_blocks(reversed(blocks), self._handed_over)
        self._step += 1

    def forget(self) -> None:
        """The KV cache was reset: no handle from before may be used."""
        self._stamps.renew(_draw_epoch())

    def answer(self, message: bytes) -> bytes | None:
        """The answer to a message that came in by the side channel, or ``None`` when it deserves none."""
        try:
            question = decode(message)
        except Unreadable:
            return None
        if question.engine != self._engine_id:
            return encode_answer(0)
        return encode_answer(self._stamps.intact(question.moment, question.blocks))

    def _handed_over(self, block: Any) -> None:
        self._stamps.handed_over(block.block_id)


def _draw_epoch() -> str:
    return secrets.token_hex(EPOCH_DIGITS // 2)
