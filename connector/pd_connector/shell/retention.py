"""Unpinned retention on the holder: a finished turn's blocks go back to the pool and can still be read.

vLLM's own way keeps every finished turn's blocks until they are read or a timer ends; while they are kept the engine
admits nothing into them. Here they return to the end of the pool's free queue at once, so that they are the last to be
taken, and `core.stamps` notes when one is.

Runs in the scheduler's thread, except `answer`, which the side channel's thread calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pd_connector.core import lease_message, question
from pd_connector.core.lease_message import Answer, NewEnd
from pd_connector.core.question import Unreadable
from pd_connector.core.stamps import Stamps
from pd_wire import names
from pd_wire.lease import Lease
from pd_wire.moment import EPOCH_DIGITS, Moment


@dataclass(frozen=True, slots=True)
class Kept:
    """What a handle has to carry about its blocks."""

    mode: str
    moment: Moment
    lease: Lease | None = None


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
        self._readable: set[int] = set()
        self._handed_over_blocks = 0
        self._untold = True
        """Numbers have changed outside of a step, which alone tells them; at first the engine has told none at all."""

    @property
    def pending(self) -> bool:
        """An idle engine has to take a step: blocks wait to be given back, or numbers to be told."""
        return self._untold or bool(self._waiting)

    def keep_readable(self, block_ids: Sequence[int]) -> Kept:
        """Hold a finished turn's blocks until they can be given back with a watch on each.

        To be called before vLLM frees them. Returns what the handle has to carry.
        """
        self._waiting.append((self._step + self._steps, self._touch(block_ids)))
        return Kept(names.MODE_UNPINNED, self._stamps.now)

    def make_room(self, request: Any, local_tokens: int) -> None:
        """vLLM is about to look for blocks for a waiting request, of which the prefix cache has ``local_tokens``."""

    def allocated(self, request: Any, blocks: int) -> None:
        """A waiting request has got ``blocks``, those of the prefix cache included."""

    def gone(self, request_id: str) -> None:
        """A request has ended."""

    def relieve(self) -> bool:
        """A running request finds no block and would be preempted: give back what can be, early.

        vLLM itself keeps blocks back that a step under way may still write to where that matters, so this costs no more
        than their place in the free queue. Returns whether there are more free blocks now.
        """
        before = self._pool.get_num_free_blocks()
        for _, blocks in self._waiting:
            self._give_back(blocks)
        self._waiting.clear()
        return bool(self._pool.get_num_free_blocks() > before)

    def end_step(self, scheduled: Mapping[str, int]) -> None:
        """A step is planned, with so many tokens of each request: give back what was waiting for it.

        The turn's last blocks are taken first.
        """
        while self._waiting and self._waiting[0][0] <= self._step:
            _, blocks = self._waiting.pop(0)
            self._give_back(blocks)
        self._step += 1
        self._untold = False

    def forget(self) -> None:
        """The KV cache was reset: no handle from before may be used."""
        self._stamps.renew(_draw_epoch())
        self._readable.clear()
        self._untold = True

    def answer(self, message: bytes) -> bytes | None:
        """The answer to a message that came in by the side channel, or ``None`` when it deserves none."""
        try:
            if lease_message.is_change(message):
                return lease_message.encode_answer(self._set_ends(lease_message.decode(message)))
            asked = question.decode(message)
        except Unreadable:
            return None
        if asked.engine != self._engine_id:
            return question.encode_answer(0)
        return question.encode_answer(self._stamps.intact(asked.moment, asked.blocks))

    def counts(self) -> dict[str, int]:
        """Numbers for the engine's metrics by their keys in `core.counts`."""
        return {"readable_blocks": len(self._readable), "handed_over_blocks": self._handed_over_blocks}

    def _set_ends(self, batch: Sequence[NewEnd]) -> Answer:
        return Answer([0] * len(batch))

    def _touch(self, block_ids: Sequence[int]) -> list[Any]:
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._readable.difference_update(block_ids)
        return blocks

    def _give_back(self, blocks: Sequence[Any], others: int = 0) -> None:
        """Release a reference on each. Who else holds a block counts it, but for ``others`` that are about to go."""
        self._pool.unpin_blocks(reversed(blocks), self._handed_over)
        self._readable.update(block.block_id for block in blocks if block.ref_cnt <= others)

    def _handed_over(self, block: Any) -> None:
        self._stamps.handed_over(block.block_id)
        self._readable.discard(block.block_id)
        self._handed_over_blocks += 1
        self._untold = True  # until the step ends, or, with a reset, until there is one


def without_leases(message: bytes) -> bytes | None:
    """The answer of an engine that keeps blocks in vLLM's own way: of every lease, that it is not held."""
    try:
        return lease_message.encode_answer(Answer([0] * len(lease_message.decode(message))))
    except Unreadable:
        return None


def _draw_epoch() -> str:
    return secrets.token_hex(EPOCH_DIGITS // 2)
