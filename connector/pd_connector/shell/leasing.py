"""Leased retention on the holder: as unpinned, and blocks stay referenced while a lease holds (`core.leases`).

A lease is one reference more on each block (`BlockPool.touch`), given back as unpinned blocks are, with a watch. vLLM
knows nothing of leases, so the engine's own requests must never feel them: before a waiting request is given blocks,
and at the end of each step for what the running ones may need in the next, leases end until enough is free. Both
happen before vLLM counts free blocks: a count that pretends, with the reclaiming done behind it, would be broken by a
request that finds leased blocks in the prefix cache between the two.

Runs in the scheduler's thread, except `answer`, which only sets ends.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from pd_connector.core.lease_message import Answer, NewEnd
from pd_connector.core.leases import Held, Leases
from pd_connector.shell.retention import Kept, UnpinnedRetention
from pd_wire import names
from pd_wire.lease import DEFAULT_SECONDS, DEFAULT_SHARE, TOKEN_DIGITS, Lease


@dataclass(frozen=True, slots=True)
class Needs:
    """What of vLLM's configuration decides how many blocks a request needs."""

    block_tokens: int
    max_tokens: int
    """Positions of a request, at most."""
    ahead_tokens: int
    """Positions behind the known tokens for which a step may need blocks: the next one, and those of a drafter."""
    first_tokens: int
    """Positions of a new request for which vLLM wants blocks at once, at least: all, or those of a first step."""
    step_tokens: int
    """Positions that one step computes, at most."""
    watermark_blocks: int
    """Blocks that vLLM leaves free when it admits a request."""

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return -(-min(tokens, self.max_tokens) // self.block_tokens)

    def whole(self, known: int) -> int:
        """Blocks of a request with ``known`` tokens, counted as generously as vLLM does when it admits one."""
        return self.blocks(known) + self.blocks(self.ahead_tokens)

    def step(self, requests: int) -> int:
        """Blocks that no step of so many requests needs more of, whatever they are."""
        behind = self.step_tokens // self.block_tokens + self.watermark_blocks
        return behind + requests * (1 + self.blocks(self.ahead_tokens))

    def more(self, known: int, done: int) -> int:
        """Blocks to be allocated for a request with ``known`` tokens, of which ``done`` have a place."""
        return max(0, self.blocks(max(known, done) + self.ahead_tokens) - self.blocks(done))


class LeasedRetention(UnpinnedRetention):
    """One engine's, or data-parallel rank's."""

    def __init__(
        self,
        pool: Any,
        engine_id: str,
        steps_under_way: int,
        needs: Needs,
        seconds: int,
        share: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            pool: vLLM's `BlockPool`.
            engine_id: as for the base class.
            steps_under_way: as for the base class.
            needs: what the engine's requests need.
            seconds: how long a lease holds without being prolonged.
            share: largest part of the pool's blocks that leases may hold.
            clock: seconds, never going back; the side channel's thread asks it, too.
        """
        super().__init__(pool, engine_id, steps_under_way)
        self._needs = needs
        self._seconds = seconds
        self._leases = Leases(int(share * pool.num_gpu_blocks))
        self._between_grants = threading.Lock()
        self._clock = clock
        self._live: dict[str, Any] = {}
        self._shares: dict[str, int] = {}
        """What each request with blocks may still need, by the request's id; their sum stays free."""
        self._measured = False
        self._totals = {"leases_granted": 0, "leases_refused": 0, "leases_displaced": 0, "leases_reclaimed": 0}
        self._give_way_to_resets(pool)

    @property
    def pending(self) -> bool:
        """Leases that are over keep an idle engine going, too, but not those that merely exist."""
        return super().pending or self._leases.any_over(self._clock())

    def keep_readable(self, block_ids: Sequence[int]) -> Kept:
        """As the base class; the blocks stay referenced if there is room for a lease."""
        if self._is_short():
            # The running requests count on what vLLM is about to free.
            self._totals["leases_refused"] += 1
            self._give_back(self._touch(block_ids), others=1)  # the request that ends
            return Kept(names.MODE_LEASED, self._stamps.now)
        token = secrets.token_hex(TOKEN_DIGITS // 2)
        with self._between_grants:
            grant = self._leases.grant(token, block_ids, self._clock(), self._seconds)
        if grant is None:
            self._totals["leases_refused"] += 1
            return Kept(names.MODE_LEASED, super().keep_readable(block_ids).moment)
        # Before the others end, since they may share blocks with this one.
        self._touch(grant.held.blocks)
        if len(grant.held.blocks) < len(block_ids):
            super().keep_readable(block_ids[len(grant.held.blocks) :])
        self._totals["leases_granted"] += 1
        self._totals["leases_displaced"] += len(grant.gave_way)
        for held in grant.gave_way:
            self._give_back(self._blocks(held))
        return Kept(names.MODE_LEASED, self._stamps.now, Lease(token, self._seconds))

    def make_room(self, request: Any, local_tokens: int) -> None:
        """End leases until the request can be given its blocks, unless that would not be enough."""
        # It is being offered, so it has no blocks (any more).
        self.gone(request.request_id)
        wanted = self._needs.whole(request.num_tokens)
        most = wanted + sum(self._shares.values()) + self._needs.step(len(self._live))
        if self._pool.get_num_free_blocks() >= most:
            return
        if not self._measured:
            self._measure({})
        wanted += sum(self._shares.values()) + self._needs.watermark_blocks
        if self._pool.get_num_free_blocks() >= wanted:
            return
        super().relieve()
        if not len(self._leases):
            return
        hits = self._in_use(request, local_tokens)
        least = self._needs.blocks(min(request.num_tokens, local_tokens + self._needs.first_tokens))
        if self._pool.get_num_free_blocks() + self._leases.blocks < least - len(hits):
            return  # it has to wait for others to end, with leases or without
        self._reclaim(wanted - len(hits), self._leases.by_value(self._clock()), hits)

    def allocated(self, request: Any, blocks: int) -> None:
        """Note what the request may need besides."""
        self._live[request.request_id] = request
        self._shares[request.request_id] = max(0, self._needs.whole(request.num_tokens) - blocks)

    def gone(self, request_id: str) -> None:
        """Nothing is kept free for it any more."""
        self._live.pop(request_id, None)
        self._shares.pop(request_id, None)

    def end_step(self, scheduled: Mapping[str, int]) -> None:
        """End the leases that are over, and as many as the running requests need for their next step."""
        super().end_step(scheduled)
        for held in self._leases.over(self._clock()):
            self._end(held)
        self._measured = False
        if len(self._leases) and self._pool.get_num_free_blocks() < self._needs.step(len(self._live)):
            self._reclaim(self._measure(scheduled), self._leases.by_value(self._clock()))

    def relieve(self) -> bool:
        """As the base class; the next lease or more end if that is not enough."""
        if super().relieve():
            return True
        before = self._pool.get_num_free_blocks()
        self._reclaim(before + 1, self._leases.by_value(self._clock()))
        return bool(self._pool.get_num_free_blocks() > before)

    def forget(self) -> None:
        """No handle from before may be used, so no lease is worth anything."""
        super().forget()
        self._end_all()

    def counts(self) -> dict[str, int]:
        """Numbers for the engine's metrics."""
        held = {"leases": len(self._leases), "leased_blocks": self._leases.blocks, "lease_cap_blocks": self._leases.cap}
        return super().counts() | held | self._totals

    # --- parts ----------------------------------------------------------------------------------

    def _set_ends(self, batch: Sequence[NewEnd]) -> Answer:
        now = self._clock()
        with self._between_grants:
            left = [self._leases.set_end(item.token, now, item.seconds) for item in batch]
        # `None` is what is not held, so it has not been ended.
        return Answer([seconds or 0 for seconds in left], ended=0 in left)

    def _is_short(self) -> bool:
        """Whether the next step needs more than is free, even without the leases that may give way."""
        if self._pool.get_num_free_blocks() >= self._needs.step(len(self._live)):
            return False
        wanted = self._measure({})
        self._reclaim(wanted, self._leases.may_give_way(self._clock()))
        return bool(self._pool.get_num_free_blocks() < wanted)

    def _measure(self, scheduled: Mapping[str, int]) -> int:
        """Blocks that must be free for the next step of all requests that have some, noted for each of them.

        Takes about a microsecond per request, so it is done where blocks are few.
        """
        self._measured = True
        for request_id, request in self._live.items():
            done = request.num_computed_tokens + scheduled.get(request_id, 0)
            preempted = request.status == RequestStatus.PREEMPTED
            self._shares[request_id] = 0 if preempted else self._needs.more(request.num_tokens, done)
        return sum(self._shares.values()) + self._needs.watermark_blocks

    def _reclaim(self, wanted: int, candidates: Sequence[Held], hits: Collection[int] = ()) -> None:
        """End leases in this order until ``wanted`` blocks are free.

        A block among ``hits`` that becomes free is wanted as well: the request takes it out of the free queue again.
        """
        for held in candidates:
            if self._pool.get_num_free_blocks() >= wanted:
                return
            self._totals["leases_reclaimed"] += 1
            for block in self._end(held):
                wanted += block.block_id in hits and block.ref_cnt == 0

    def _in_use(self, request: Any, local_tokens: int) -> set[int]:
        """Blocks of the prefix cache that this request will share, and that are not free already."""
        if self._pool.hash_block_size != self._needs.block_tokens:
            return set()
        found = set()
        for block_hash in request.block_hashes[: local_tokens // self._needs.block_tokens]:
            blocks = self._pool.get_cached_block(block_hash, [0])
            if blocks and blocks[0].ref_cnt:
                found.add(blocks[0].block_id)
        return found

    def _end(self, held: Held) -> list[Any]:
        self._leases.remove(held)
        blocks = self._blocks(held)
        self._give_back(blocks)
        return blocks

    def _end_all(self) -> None:
        self._untold = True
        for held in self._leases.by_value(self._clock()):
            self._end(held)

    def _blocks(self, held: Held) -> list[Any]:
        return [self._pool.blocks[block_id] for block_id in held.blocks]

    def _give_way_to_resets(self, pool: Any) -> None:
        """vLLM resets a pool (new weights, a sleep) only when nothing is referenced, and tells connectors afterwards.

        If it can't, for the sake of running requests, the leases are gone for nothing.
        """
        reset = pool.reset_prefix_cache

        def ended_first() -> Any:
            self._end_all()
            return reset()

        pool.reset_prefix_cache = ended_first


def make_retention(mode: str, vllm_config: Any, pool: Any, engine_id: str, watermark_blocks: int) -> UnpinnedRetention:
    """What the configuration asks for, which is not Pinned."""
    steps = vllm_config.max_concurrent_batches - 1
    if mode != names.MODE_LEASED:
        return UnpinnedRetention(pool, engine_id, steps)
    most = vllm_config.model_config.max_model_len
    scheduling = vllm_config.scheduler_config
    needs = Needs(
        block_tokens=vllm_config.cache_config.block_size,
        max_tokens=most,
        step_tokens=scheduling.max_num_batched_tokens,
        first_tokens=most if scheduling.scheduler_reserve_full_isl else scheduling.max_num_batched_tokens,
        ahead_tokens=1 + vllm_config.num_speculative_tokens + vllm_config.num_lookahead_tokens,
        watermark_blocks=watermark_blocks,
    )
    option = vllm_config.kv_transfer_config.get_from_extra_config
    seconds = option(names.LEASE_SECONDS_OPTION, DEFAULT_SECONDS)
    share = option(names.LEASE_SHARE_OPTION, DEFAULT_SHARE)
    return LeasedRetention(pool, engine_id, steps, needs, seconds, share)
