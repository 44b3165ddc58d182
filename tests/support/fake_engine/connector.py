"""One fake engine's KV connector: what it matches, pulls, retains, hands out and forgets, without any HTTP.

It follows vLLM's pull connector (0.32) rule by rule, faults included, because a router must be safe against the real
one: reads are positional, a freed block reads as whatever is in it now, the remote list is cut to its tail. In
``verified`` mode our own connector's decisions come on top (`verified`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pd_connector.core.admission import Admission, Leg
from pd_connector.core.notices import marked
from pd_connector.core.stamps import Stamps
from pd_wire import lease, names
from pd_wire.moment import Moment
from support.fake_engine.answers import BlockContent, next_context, root_context
from support.fake_engine.blocks import BlockPool, prefix_hashes
from support.fake_engine.fabric import Fabric
from support.fake_engine.leases import Promises
from support.fake_engine.verified import Verifier, report_of

EXPIRY_MARGIN = 5.0
TOLD_CACHED = "remote_prefill_cached_tokens"
"""Seconds before the end of a lease from which on vLLM declines to read."""

_ADDRESS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class LoadFailed(Exception):
    """The KV that a request counts on cannot be loaded; what the client sees is the load-failure policy's business."""


class Parked(Exception):
    """The request waits for KV that will never come; only an abort ends it."""


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """Sizes in blocks and tokens, times in seconds; defaults follow vLLM except for the small block."""

    role: Literal["prefill", "decode"]
    mode: Literal["stock", "verified"] = "verified"
    bidirectional: bool = True
    block_tokens: int = 16
    blocks: int = 1 << 18
    prefix_caching: bool | None = None
    retention: Literal["Pinned", "Unpinned", "Leased"] = "Pinned"
    lease_seconds: int = 60
    lease_share: float = 0.5
    decoder_ttl: float = 480.0
    lease: float = 30.0
    recompute_threshold: int = 64
    tells_cached: bool = True
    """Prefill tells decode how much of the prompt it had (vLLM 0.32 and later)."""
    handle_extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """A running request: its ids so far, its blocks, and where each prompt token's KV came from."""

    request_id: str
    tokens: list[int]
    prompt_length: int
    model: str
    salt: str
    params: dict[str, Any] | None
    blocks: list[int] = field(default_factory=list)
    local: int = 0
    pulled: int = 0
    gone: int = 0
    wasted: int = 0
    admission: Admission | None = None
    pulling_from: str | None = None
    read_failed: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Retained:
    """Blocks of a finished request that wait for a reader; ``expiry`` is on the fabric's clock, None means for ever."""

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]
    expiry: float | None


class Connector:
    """KV side of one engine process; a restart makes a new one."""

    def __init__(
        self, config: ConnectorConfig, fabric: Fabric, host: str, port: int, name: str, rank: int | None = None
    ) -> None:
        """``rank`` is for one of several data-parallel ranks of one engine; `port` is then that rank's."""
        self.config, self.fabric, self.host, self.port, self.name = config, fabric, host, port, name
        self.rank = rank
        self.engine_id = f"{name}-{secrets.token_hex(8)}" + ("" if rank is None else f"_dp{rank}")
        caches = config.prefix_caching if config.prefix_caching is not None else config.role == "decode"
        self.pool = BlockPool(config.blocks, config.block_tokens, caches_prefixes=caches)
        self.counters: Counter[str] = Counter()
        self.frozen = False
        self.pull_delay = 0.0
        self.cut_off: set[str] = set()
        """Names of engines whose blocks can't be read from here, although both engines are well (EL-04)."""
        self._retained: dict[str, Retained] = {}
        self.promises = Promises(self.pool, fabric.clock, int(config.blocks * config.lease_share))
        self._stamps = Stamps(config.blocks, secrets.token_hex(8))
        self._clock_offset = secrets.randbelow(1_000_000) + 0.25
        self._verifier = Verifier(config.block_tokens, bidirectional=config.bidirectional)
        fabric.join(self)

    # --- what the outside may look at ---------------------------------------------------------

    def clock(self) -> float:
        """This process's own monotonic clock; its zero is nobody else's."""
        return self.fabric.clock.now() + self._clock_offset

    def expire(self) -> None:
        """Free retained blocks whose time is over."""
        self.promises.expire()
        now = self.fabric.clock.now()
        for request_id, kept in list(self._retained.items()):
            if kept.expiry is not None and kept.expiry <= now:
                self.counters["expired"] += 1
                self._free_retained(request_id)

    def retained(self) -> dict[str, Retained]:
        """What is held for readers now."""
        self.expire()
        return dict(self._retained)

    def free_blocks(self) -> int:
        """Blocks that nobody holds now."""
        self.expire()
        return self.pool.free

    def retained_tokens(self, request_id: str) -> tuple[int, ...] | None:
        """Ids behind a retained request, for the judge only: a real reader cannot ask."""
        kept = self._retained.get(request_id)
        return kept.tokens if kept else None

    def intact(self, engine_id: str, moment: Moment, blocks: Sequence[int]) -> int:
        """The side channel's answer: how many of the leading blocks nobody else got since."""
        return self._stamps.intact(moment, blocks) if engine_id == self.engine_id else 0

    # --- life of a request --------------------------------------------------------------------

    async def admit(self, run: Run) -> None:
        """Give a request its prompt's KV: local hits, then a pull, then computing the rest.

        Raises:
            LoadFailed: the pull was declined or failed.
            Parked: a stock engine would wait for ever.
        """
        self.expire()
        size = self.config.block_tokens
        prompt = run.tokens
        hashes = prefix_hashes(prompt, size, f"{run.model}/{run.salt}")
        reusable = hashes[: (len(prompt) - 1) // size]
        run.blocks = self.pool.cached_prefix(reusable)
        run.local = len(run.blocks) * size
        params = self._judged_params(run)
        count = self._matched_tokens(run, params)
        if params is not None and params.get("remote_block_ids"):
            if count > 0:
                await self._pull(run, params, count)
            else:
                self.fabric.notify(params, self)
        await self._fill(run, hashes)

    async def recompute(self, run: Run) -> None:
        """Compute what could not be loaded: `kv_load_failure_policy: recompute`, where it works (HL-07)."""
        run.read_failed = True
        await self._fill(run, prefix_hashes(run.tokens, self.config.block_tokens, f"{run.model}/{run.salt}"))

    async def _fill(self, run: Run, hashes: list[bytes]) -> None:
        """Compute what is neither local nor pulled."""
        size, prompt = self.config.block_tokens, run.tokens
        run.blocks += await self._allocate(-(-len(prompt) // size) - len(run.blocks))
        self._compute(run, run.local + run.pulled, prompt)
        self.pool.remember(run.blocks, hashes)
        self.counters["local_cache_hit"] += run.local
        self.counters["external_kv_transfer"] += run.pulled
        self.counters["local_compute"] += len(prompt) - run.local - run.pulled

    def contents(self, run: Run) -> list[BlockContent]:
        """The KV that this request really has, position by position."""
        return [self.pool.read(number) for number in run.blocks]

    def finish(self, run: Run, generated: Sequence[int]) -> dict[str, Any] | None:
        """End a request that stopped by itself; the handle, if this role gives one."""
        tokens = [*run.tokens, *generated[:-1]]
        self._compute(run, run.prompt_length, tokens)
        hashes = prefix_hashes(tokens, self.config.block_tokens, f"{run.model}/{run.salt}")
        self.pool.remember(run.blocks, hashes)
        run.done = True
        params = run.params
        if not params:
            self.pool.release(run.blocks)
            return None
        to_decode = bool(params.get("do_remote_decode")) if run.admission is None else run.admission.leg is Leg.PREFILL
        extra: dict[str, Any] | None = {}
        if run.admission is not None:
            extra = self._own_keys(run, run.admission, tokens, to_decode=to_decode)
        if extra is not None and to_decode and self.config.tells_cached:
            extra = {**extra, TOLD_CACHED: run.local + run.pulled}
        if extra is None or not (to_decode or self.config.bidirectional):
            self.pool.release(run.blocks)
            return None
        return self._retain(run, tokens, extra, to_decode=to_decode)

    def abort(self, run: Run) -> None:
        """End a request from outside: no handle, and its blocks are free at once. Harmless after the end."""
        if run.done:
            return
        run.done = True
        if run.pulling_from is not None:
            self.counters["aborted_in_pull"] += 1
        self.pool.release(run.blocks)

    def notified(self, request_id: str, reader: str, *, read: bool) -> None:
        """A reader says that it is done with a request's blocks, having read them or not."""
        self.expire()
        if request_id not in self._retained:
            self.counters["notifications_after_expiry"] += 1
            if not read:
                return
            self.fabric.violate(self.name, f"blocks of unknown request {request_id} were read by {reader}")
            return
        self._free_retained(request_id)

    # --- inside -------------------------------------------------------------------------------

    def _judged_params(self, run: Run) -> Mapping[str, Any] | None:
        """The params that vLLM's hooks act on; in verified mode our connector has judged and cut them first."""
        if self.config.mode == "stock" or run.params is None:
            return run.params
        given = run.params
        run.admission = admission = self._verifier.judge(given, run.tokens, run.model, run.salt)
        run.params = admission.params
        if admission.may_pull:
            return admission.params
        if admission.notify:
            self.fabric.notify(given, self)
        return None

    def _matched_tokens(self, run: Run, params: Mapping[str, Any] | None) -> int:
        """`get_num_new_matched_tokens`: how many tokens beyond the local hits come from elsewhere."""
        if params is None:
            return 0
        if params.get("do_remote_prefill"):
            return max(0, len(run.tokens) - run.local)
        if not (params.get("do_remote_decode") and params.get("remote_block_ids")):
            return 0
        if not all(key in params for key in _ADDRESS):
            return 0
        count = min(int(params.get("remote_num_tokens") or 0), len(run.tokens)) - run.local
        return count if count > 0 and count >= self.config.recompute_threshold else 0

    async def _pull(self, run: Run, params: Mapping[str, Any], count: int) -> None:
        if params.get("do_remote_decode") and not self.config.bidirectional:
            self.fabric.violate(self.name, "handle sent to an engine without bidirectional transfer")
            raise Parked
        remote = await self.fabric.visit(params)
        if remote is None or remote.frozen:
            self.counters["failed_transfers"] += 1
            raise LoadFailed("peer is gone")
        if remote.name in self.cut_off:
            self.counters["failed_transfers"] += 1
            raise LoadFailed("NIXL_ERR_REMOTE_DISCONNECT")
        if remote.engine_id != params["remote_engine_id"]:
            self.counters["failed_transfers"] += 1
            raise LoadFailed("Remote NIXL agent engine ID mismatch")
        deadline = params.get("remote_blocks_expiry_time")
        if params.get("do_remote_decode") and deadline is not None and remote.clock() + EXPIRY_MARGIN >= deadline:
            self.counters["expired"] += 1
            raise LoadFailed("Declining expired remote read")
        size = self.config.block_tokens
        moment = run.admission.moment if run.admission is not None else None
        if moment is not None:
            count = self._narrowed(run, remote, params, moment, count)
            if count <= 0:
                return
        end = run.local + count
        wanted = -(-end // size) - len(run.blocks)
        source = list(params["remote_block_ids"][0])
        if moment is not None:
            source = source[: -(-end // size)]
        if wanted > len(source):
            self.fabric.violate(self.name, f"{wanted} local blocks against {len(source)} remote ones: worker assertion")
            raise LoadFailed("assertion in the worker")
        source = source[-wanted:]
        if params.get("do_remote_prefill"):
            self._judge_prompt(run, remote.retained_tokens(params["remote_request_id"]))
        fresh = await self._allocate(wanted)
        run.blocks += fresh
        run.pulling_from = remote.name
        if self.pull_delay:
            await asyncio.sleep(self.pull_delay)
        for mine, theirs in zip(fresh, source, strict=True):
            self.pool.write(mine, remote.pool.read(theirs))
        run.pulling_from = None
        run.pulled = count
        self.counters["transfers"] += 1
        self.counters["blocks_pulled"] += wanted
        if moment is not None:
            intact = remote.intact(params["remote_engine_id"], moment, params["remote_block_ids"][0]) * size
            run.pulled = max(0, min(count, intact - run.local))
            run.wasted = count - run.pulled
            return
        remote.notified(params["remote_request_id"], self.name, read=True)

    def _narrowed(self, run: Run, remote: Connector, params: Mapping[str, Any], moment: Moment, count: int) -> int:
        """What is left of ``count`` tokens to be read when the holder was asked."""
        blocks = params["remote_block_ids"][0]
        intact = remote.intact(params["remote_engine_id"], moment, blocks)
        run.gone = (len(blocks) - intact) * self.config.block_tokens
        return min(count, intact * self.config.block_tokens - run.local)

    def _judge_prompt(self, run: Run, prefilled: tuple[int, ...] | None) -> None:
        if prefilled is not None and prefilled[: len(run.tokens)] != tuple(run.tokens):
            self.fabric.violate(self.name, "the decode leg's prompt differs from the prefill leg's")

    async def _allocate(self, count: int) -> list[int]:
        """Take blocks, waiting for others to end as a scheduler's queue does."""
        if count > self.pool.count:
            raise LoadFailed("the prompt is larger than the whole KV memory")
        while self.free_blocks() < count:
            if self.promises.give_up_one():
                continue
            self.counters["waits_for_blocks"] += 1
            await asyncio.sleep(0.005)
        return self._take(count)

    def _take(self, count: int) -> list[int]:
        taken = self.pool.allocate(count)
        for number in taken:
            self._stamps.handed_over(number)
        return taken

    def _compute(self, run: Run, start: int, tokens: Sequence[int]) -> None:
        """Write the KV of positions ``start ..`` behind whatever the blocks in front of them hold."""
        size = self.config.block_tokens
        missing = -(-len(tokens) // size) - len(run.blocks)
        if missing > 0:
            self.expire()
            while self.pool.free < missing and self.promises.give_up_one():
                pass
            run.blocks += self._take(missing)
        for index in range(start // size, -(-len(tokens) // size)):
            first = index * size
            if first >= start:
                before = self.pool.read(run.blocks[index - 1]) if index else None
                context = next_context(before) if before is not None else root_context(run.model)
                held: list[int] = []
            else:
                block = self.pool.read(run.blocks[index])
                context, held = block.context, block.tokens[: start - first]
            held = held + list(tokens[first + len(held) : first + size])
            self.pool.write(run.blocks[index], BlockContent(context, held))

    def _own_keys(self, run: Run, admission: Admission, tokens: list[int], *, to_decode: bool) -> dict[str, Any] | None:
        """Our connector's part of the handle; None when it would not keep the blocks."""
        if to_decode:
            report = report_of(admission, run.local, run.pulled, run.gone, run.wasted, read_failed=run.read_failed)
            return {} if report is None else {names.REPORT_KEY: report}
        return self._verifier.prove(tokens, run.model, run.salt, self.config.retention) if admission.retain else None

    def _retain(self, run: Run, tokens: list[int], extra: dict[str, Any], *, to_decode: bool) -> dict[str, Any]:
        config = self.config
        ttl = config.lease if to_decode else config.decoder_ttl
        expiry = self.fabric.clock.now() + ttl
        # vLLM's worker starts a timer only for requests that had a remote flag when they were admitted (HL-09).
        unpinned = not to_decode and config.mode == "verified" and config.retention != names.MODE_PINNED
        tracked = to_decode or config.mode == "verified" or bool(run.params and run.params.get("do_remote_prefill"))
        request_id = run.request_id
        if unpinned:
            request_id = marked(request_id)
            extra = {**extra, names.MOMENT_KEY: str(self._stamps.now)}
            if config.retention == names.MODE_LEASED and self.promises.has_room(len(run.blocks)):
                promised = lease.Lease(secrets.token_hex(lease.TOKEN_DIGITS // 2), config.lease_seconds)
                self.promises.promise(promised, run.blocks)
                self.fabric.tokens.add(promised.token)
                extra[names.LEASE_KEY] = str(promised)
            else:
                self.pool.release(run.blocks)
        else:
            self._retained[request_id] = Retained(tuple(run.blocks), tuple(tokens), expiry if tracked else None)
        handle: dict[str, Any] = {
            "do_remote_prefill": to_decode,
            "do_remote_decode": not to_decode,
            "remote_block_ids": [list(run.blocks)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(tokens),
            "remote_blocks_expiry_time": None if to_decode or unpinned else expiry + self._clock_offset,
            "transfer_mode": "read",
            **config.handle_extras,
            **extra,
        }
        self.fabric.issue(request_id, self.engine_id, handle)
        return handle

    def _free_retained(self, request_id: str) -> None:
        self.pool.release(self._retained.pop(request_id).blocks)
