"""One turn's handle: under which keys the last turn left one, whether it may be used, and where this turn's is kept.

Separate from the turn's control flow because it is the same for every attempt and every endpoint, and because it is all
that a turn has to do with stores, its own and those that several routers share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pd_router.core.history import Reply
from pd_router.core.leases import Why
from pd_router.core.placement import Engine
from pd_router.core.plan import Plan
from pd_router.core.policy import Decision, Drop, NotStored, decide, judge_handle, newest_keys, told_retention
from pd_router.core.request import BYTES_PER_TOKEN, Prepared
from pd_router.core.responses import PREVIOUS
from pd_router.core.store import Entry, Found, Opened, PutResult, Ticket
from pd_router.core.wishes import NO_WISH, Wish
from pd_router.shell.context import Context
from pd_router.shell.fleet import Member
from pd_router.shell.lease_keeper import Used
from pd_router.shell.legs import Prefilled
from pd_router.shell.record import TurnRecord
from pd_wire import lease


class Dispatch(NamedTuple):
    """A decode leg as it was sent: what its handle belongs to, even if the engine has another process by then."""

    decode: Member
    incarnation: int
    identity: str
    at: float


class _Right(NamedTuple):
    """By which a lease is prolonged, and for how long; with `exact` not longer."""

    name: str
    seconds: float
    exact: bool

    def __str__(self) -> str:
        return f"{self.name} {self.seconds:g} s"


class Recalling(Exception):
    """The items of an earlier response are kept elsewhere and have to be waited for."""

    def __init__(self, answer: Awaitable[list[Any] | None]) -> None:
        super().__init__()
        self.answer = answer


async def _both(one: Awaitable[None], other: Awaitable[None]) -> None:
    await asyncio.gather(one, other)


async def _quietly(answer: Awaitable[Any]) -> None:
    await answer


class Keeper:
    """Finds and keeps the handles of one turn of `tenant`, None for nobody's."""

    def __init__(self, context: Context, record: TurnRecord, tenant: str | None) -> None:
        self._context = context
        self._record = record
        self._tenant = tenant
        self.keys: tuple[bytes, ...] = ()
        """Where the last turn's handle may be; empty for a turn without reuse."""
        self.brings_handle = True
        """The endpoint of these engines carries the handle in its answer."""
        self.wish: Wish = NO_WISH
        self._used: Used | None = None
        """The lease of what the last turn left, while this one runs."""
        self._found: tuple[bytes, ...] = ()
        """The key that led there."""
        self._turn_number = 0
        self._ticket: Ticket | None = None
        self._over_limit = False

    def identify(self, prepared: Prepared) -> None:
        """Whose turn it is, and under which keys its handle may be."""
        context = self._context
        self._record.fields["model"] = prepared.model
        self._record.fields["stream"] = prepared.stream
        if not context.settings.reuse.enabled:
            self._record.dropped(Drop.DISABLED)
        elif self._tenant is None:
            self._record.dropped(Drop.NO_TENANT)
        elif prepared.link_fault is not None:
            self._record.fields["link_fault"] = prepared.link_fault
            self._record.dropped(Drop.NOT_LINKABLE)
        else:
            self._record.stage("eligible")
            self.keys = context.keyring.lookup_keys(self._tenant, prepared)

    async def open(self) -> Found | None:
        """Take what the last turn left. Before the look at the engines, since a shared store makes the turn wait."""
        opened = self._context.store.open(self.keys, self._context.now())
        if not isinstance(opened, Opened):
            opened = await opened
        self._turn_number, self._ticket = opened.turn, opened.ticket
        if opened.found is not None:
            self._found = (opened.found.key,)
            self._used = self._context.leases.begin(opened.found.entry)
        return opened.found

    def close(self) -> None:
        """The turn is over."""
        if self._used is not None:
            self._context.leases.end(self._used)

    def find(self, prepared: Prepared, found: Found | None, decodes: Sequence[Engine]) -> Decision:
        """Whether what was taken may be used now."""
        context = self._context
        now = context.now()
        decision = decide(
            prepared,
            found,
            now=now,
            engines=decodes,
            hosts=context.fleet.hosts(),
            ttl=context.settings.reuse.handle_ttl,
            shared_ttl=context.settings.reuse.shared_ttl,
            threshold=context.settings.reuse.recompute_threshold,
            newest_keys=newest_keys(prepared, self.keys),
        )
        for stage in decision.stages:
            self._record.stage(stage)
        if decision.drop is not None:
            self._record.dropped(decision.drop)
        return decision

    def keep(
        self,
        prepared: Prepared,
        planned: Plan,
        sent: Dispatch,
        handle: dict[str, object] | None,
        reply: Reply | None,
        answer_id: str,
        calls_tools: bool,
    ) -> asyncio.Future[None] | None:
        """Keep D's handle, and the answer where it may be named. Called before the last byte is written: the next turn
        may follow at once, on any router.

        Returns what has to be done before that byte, or None when all is done.
        """
        items = self._keep_items(prepared, reply, answer_id)
        stored = self._keep_handle(prepared, planned, sent, handle, reply, answer_id, calls_tools)
        if items is None or stored is None:
            return items or stored
        return asyncio.ensure_future(_both(items, stored))

    def _keep_handle(
        self,
        prepared: Prepared,
        planned: Plan,
        sent: Dispatch,
        handle: dict[str, object] | None,
        reply: Reply | None,
        answer_id: str,
        calls_tools: bool,
    ) -> asyncio.Future[None] | None:
        context, decode = self._context, sent.decode
        if self._tenant is None or not context.settings.reuse.enabled:
            return None
        if self.wish.end:
            return self._end(prepared)
        if not self.keys:
            return None
        if handle is None and planned.bypass and planned.decision.entry is not None:
            carried = self._carried(prepared, planned.decision.entry, reply)
            if planned.decision.entry.lease and not carried.lease and (calls_tools or self.wish.hold):
                self._record.fields["lease_not_kept"] = "over"
            return self._put(carried, prepared, reply, answer_id, calls_tools)
        fault = NotStored.TENANT_LIMIT if self._over_limit else judge_handle(handle, context.fleet.hosts())
        if fault is not None or handle is None:
            self._record.not_stored(fault or NotStored.NO_HANDLE)
            forgotten = context.store.forget(self.keys)
            return None if forgotten is None else asyncio.ensure_future(forgotten)
        now = context.now()
        entry = Entry.of(
            handle,
            holder=decode.key,
            incarnation=str(sent.incarnation),
            generation=decode.generation,
            arrived=now,
            turn=self._turn_number,
            inexact=prepared.inexact or (reply.inexact if reply is not None else "reply unknown"),
            sent=sent.at,
            identity=sent.identity if decode.incarnation == sent.incarnation else "",
            ticket=self._ticket,
        )
        if entry.lease and (decode.incarnation != sent.incarnation or context.fleet.member(decode.key) is not decode):
            entry.lease = ""  # of a process that is gone
        if not entry.shared:
            context.guard.retained.add(self._tenant, decode.key, entry.remote_tokens, now)
        decode.retention, decode.fallback = told_retention(handle)
        if entry.rank is not None:
            decode.ranks.add(entry.rank)
        return self._put(entry, prepared, reply, answer_id, calls_tools)

    def _put(
        self, entry: Entry, prepared: Prepared, reply: Reply | None, answer_id: str, calls_tools: bool
    ) -> asyncio.Future[None] | None:
        context, tenant = self._context, self._tenant or ""
        keys = context.keyring.store_keys(tenant, prepared, reply, answer_id)
        entry.conversations = context.keyring.conversations(tenant, prepared)
        promised = lease.parse(entry.lease) if entry.lease else None
        if promised is not None and self.wish.hold == 0:
            entry.lease = ""
            context.leases.release(entry.holder, promised, Why.DECLINED)
        result = context.store.put(entry, keys, context.now())
        if isinstance(result, PutResult):
            return self._kept(result, entry, promised, calls_tools)
        return asyncio.ensure_future(self._kept_later(result, entry, promised, calls_tools))

    def _end(self, prepared: Prepared) -> asyncio.Future[None] | None:
        """No turn follows: drop what the last one left, and all that is left of the conversation."""
        self._record.fields["conversation"] = "ended"
        context = self._context
        if self._used is not None:
            context.leases.release(*self._used, Why.ENDED)
        conversations = context.keyring.conversations(self._tenant or "", prepared)
        ended = context.store.end(self._found, conversations, context.now())
        return None if isinstance(ended, bool) else asyncio.ensure_future(_quietly(ended))

    def _carried(self, prepared: Prepared, entry: Entry, reply: Reply | None) -> Entry:
        """The handle of the turn before, for the turn after one that decode served alone and that left none: it was not
        sent, and what it names is a prefix of the longer conversation too. It does not live longer for it."""
        self._context.store.spent(entry)  # it is counted as retained once more when it is put
        content = reply.message.get("content") if reply is not None else None
        said = len(content) // BYTES_PER_TOKEN if isinstance(content, str) else 0
        return replace(
            entry,
            keys=(),
            lease="" if self._used is None else str(self._used.lease),
            turn=self._turn_number,
            ticket=self._ticket,
            inexact=entry.inexact or prepared.inexact or (reply.inexact if reply is not None else "reply unknown"),
            behind=entry.behind + prepared.new_tokens_estimate + said,
        )

    def recall(self, answer_id: str) -> list[Any] | None:
        # A caller without a principal shares a table with others of that kind; ids of answers cannot be guessed.
        found = self._context.responses.recall(self._tenant or "", answer_id)
        if found is None or isinstance(found, list):
            return found
        raise Recalling(found)

    def _keep_items(self, prepared: Prepared, reply: Reply | None, answer_id: str) -> asyncio.Future[None] | None:
        """Keep what a turn of the Responses API added, for a next one that names it."""
        if prepared.items is None or reply is None:
            return None
        before = next((value for name, value in prepared.ids if name == PREVIOUS), None)
        kept = self._context.responses.put(self._tenant or "", answer_id, before, (*prepared.items, *reply.items))
        if isinstance(kept, bool):
            self._record.fields["response_kept"] = kept
            return None
        return asyncio.ensure_future(self._items_kept_later(kept))

    async def _items_kept_later(self, kept: Awaitable[bool]) -> None:
        self._record.fields["response_kept"] = await kept

    def _kept(
        self, result: PutResult, entry: Entry, promised: lease.Lease | None, calls_tools: bool
    ) -> asyncio.Future[None] | None:
        if result is PutResult.UNAVAILABLE:
            self._record.not_stored(NotStored.STORE_UNAVAILABLE)
        else:
            self._record.stored(result.value)
        leases, used = self._context.leases, self._used
        stored = result in (PutResult.STORED, PutResult.PARTLY_LATE)
        carried = used is not None and used.lease == promised
        if stored and used is not None and not carried:
            leases.release(*used, Why.SUPERSEDED)
        if promised is None:
            return None
        right = None
        if not stored and carried:
            return None  # it stays with the handle of the turn before, or with a twin's of this one
        if not stored:
            leases.release(entry.holder, promised, Why.NOT_KEPT)
        elif self.wish.hold is not None:
            right = _Right("hold", self.wish.hold, True)
        elif calls_tools and (tool_hold := self._context.settings.reuse.lease_tool_hold):
            right = _Right("tools", tool_hold, False)
        if right is None or not entry.lease:
            self._record.leased(promised.seconds, str(right or ""))
            return None
        may = self._context.guard.retained.prolong(
            self._tenant or "",
            entry.holder,
            promised.token,
            entry.remote_tokens,
            right.seconds,
            self._context.now(),
        )
        if not isinstance(may, bool):
            return asyncio.ensure_future(self._hold_later(may, entry, promised, right))
        self._hold(may, entry, promised, right)
        return None

    def _hold(self, may: bool, entry: Entry, promised: lease.Lease, right: _Right) -> None:
        if may:
            if self._context.leases.hold(entry, right.seconds, exact=right.exact):
                self._record.leased(promised.seconds, str(right))
            else:
                self._context.guard.retained.let_go(promised.token)
                self._record.leased(promised.seconds, "")
                self._record.fields["lease_not_kept"] = "over"
        else:
            self._record.leased(promised.seconds, "")
            self._record.fields["lease_not_kept"] = "tenant_retained_limit"
            self._context.guard.limited["tenant_retained_limit"].inc()

    async def _hold_later(self, may: Awaitable[bool], entry: Entry, promised: lease.Lease, right: _Right) -> None:
        self._hold(await may, entry, promised, right)

    async def _kept_later(
        self, result: Awaitable[PutResult], entry: Entry, promised: lease.Lease | None, calls_tools: bool
    ) -> None:
        held = self._kept(await result, entry, promised, calls_tools)
        if held is not None:
            await held

    async def may_retain(self, prepared: Prepared, prefilled: Prefilled | None) -> bool:
        """Whether the tenant may let decode keep this turn's blocks; by its prompt, since no answer is there yet."""
        if not self.keys or not self.brings_handle or self.wish.end:
            return False
        tokens = prefilled.prompt_tokens if prefilled is not None else None
        room = self._context.guard.retained.has_room(
            self._tenant or "", tokens or prepared.prompt_tokens_estimate, self._context.now()
        )
        if not isinstance(room, bool):
            room = await room
        self._over_limit = not room
        if not room:
            self._context.guard.limited["tenant_retained_limit"].inc()
        return room
