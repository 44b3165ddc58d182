"""One turn from request to answer, top to bottom.

The order of work is visible in `Turn._serve` and `Turn._attempt`: find a handle, choose engines, prefill, decode, keep
the new handle; and the rule for failures is one loop: before the first byte has reached the client a turn may start
again, without the handle and on other engines where there are any; after that byte it can only end. What decides is in
`core`, how the answer is relayed in `relay`, what is counted in `record`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable
from typing import NamedTuple

from pd_router.core import errors
from pd_router.core.errors import ApiError, error_event
from pd_router.core.fields import Api
from pd_router.core.history import Reply
from pd_router.core.placement import Engine, choose_decode, choose_prefill
from pd_router.core.policy import Decision, Drop, NotStored, decide, judge_handle
from pd_router.core.request import Prepared, prepare
from pd_router.core.store import Entry, Found, Opened, PutResult, Ticket
from pd_router.shell.admission import Withdrawn
from pd_router.shell.context import Context
from pd_router.shell.exchange import Exchange, Failure, LegError
from pd_router.shell.fleet import Member
from pd_router.shell.legs import LegFailed, Prefilled, network_failure, prefill, refused, request_head
from pd_router.shell.record import TurnRecord
from pd_router.shell.relay import StreamRelay, send_whole
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

log = logging.getLogger("pd_router.turn")

ATTEMPTS_WITHOUT_HANDLE = 2
"""A turn that failed without a handle is tried once more; one that failed with a handle has that attempt for free."""
RETRY_AFTER_SECONDS = 5
CLIENT_LEFT = 499
"""What is counted for a client that did not wait; nobody sees it."""
_UNREACHED = frozenset(
    {Failure.CONNECT.value, Failure.CONNECT_TIMEOUT.value, Failure.CLOSED.value, Failure.TIMEOUT.value}
)


class Dispatch(NamedTuple):
    """A decode leg as it was sent: what its handle belongs to, even if the engine has another process by then."""

    decode: Member
    incarnation: int
    identity: str
    at: float


class Turn:
    """State of one turn."""

    def __init__(self, context: Context, api: Api, request: Request, responder: Responder) -> None:
        self._context = context
        self._api = api
        self._request = request
        self._responder = responder
        self._request_id = context.request_id(request.headers)
        self._own_headers = [(b"x-request-id", self._request_id.encode("latin-1", "replace"))]
        self._record = TurnRecord(context, self._request_id, api.value, request)
        self._status = 200
        self._tenant = request.tenant
        self._keys: tuple[bytes, ...] = ()
        self._turn_number = 0
        self._ticket: Ticket | None = None
        self._avoid: set[str] = set()
        self._two_legs = False
        self._exchange: Exchange | None = None
        self._prefilled_at = 0.0
        self._decodes: tuple[Engine, ...] = ()
        self._prefills: tuple[Engine, ...] = ()

    async def run(self) -> None:
        """Answer the request, whatever happens."""
        context, responder = self._context, self._responder
        responder.on_gone = self._client_left
        admitted = False
        try:
            prepared = prepare(self._api, self._request.body, self._request.headers, context.models())
            await context.admission.enter(self, self._tenant)
            admitted = True
            self._record.admitted()
            if responder.gone:
                raise Withdrawn
            await self._serve(prepared)
        except Withdrawn:
            self._status = CLIENT_LEFT
        except ApiError as error:
            self._answer(error)
        except Exception:
            # The top of the task: a fault of ours must cost one turn, not the process.
            log.exception("turn %s failed", self._request_id)
            self._answer(errors.internal())
        finally:
            if admitted:
                context.admission.leave()
            if self._exchange is not None:
                self._exchange.abort()
            self._record.finish(self._status)

    async def _serve(self, prepared: Prepared) -> None:
        """Try until the client has an answer or there is nothing left to try."""
        self._identify(prepared)
        clean = not self._keys
        left = ATTEMPTS_WITHOUT_HANDLE
        while True:
            found = None if clean else await self._open()
            self._look()
            decision = Decision.recompute() if clean else self._find(prepared, found)
            self._record.fields["attempts"] += 1
            try:
                await self._attempt(prepared, decision)
                return
            except LegFailed as failure:
                self._record.failed(failure, decision.attach)
                left -= 0 if decision.attach else 1
                if not failure.retryable or self._responder.gone or self._responder.started or left <= 0:
                    self._give_up(failure)
                    return
                clean = True  # what was taken is spent, whatever became of it
                self._record.retried(failure)
                log.warning(
                    "turn %s: %s, trying again%s",
                    self._request_id,
                    failure,
                    " without its handle" if decision.attach else "",
                )

    def _look(self) -> None:
        """The engines as they are now; one attempt decides everything on this view, and awaits nothing meanwhile."""
        now = self._context.now()
        self._decodes = self._context.fleet.snapshot(ROLE_DECODE, now)
        self._prefills = self._context.fleet.snapshot(ROLE_PREFILL, now) if self._two_legs else ()

    # -- finding and keeping handles ---------------------------------------------------------------
    def _identify(self, prepared: Prepared) -> None:
        """Whose turn it is, and under which keys its handle may be."""
        context = self._context
        self._two_legs = prepared.two_legs
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
            self._keys = context.keyring.lookup_keys(self._tenant, prepared)

    async def _open(self) -> Found | None:
        """Take what the last turn left. Before the look at the engines, since a shared store makes the turn wait."""
        opened = self._context.store.open(self._keys, self._context.now())
        if not isinstance(opened, Opened):
            opened = await opened
        self._turn_number, self._ticket = opened.turn, opened.ticket
        return opened.found

    def _find(self, prepared: Prepared, found: Found | None) -> Decision:
        """Whether what was taken may be used now."""
        context = self._context
        now = context.now()
        decision = decide(
            prepared,
            found,
            now=now,
            engines=self._decodes,
            hosts=context.fleet.hosts(),
            ttl=context.settings.reuse.handle_ttl,
            threshold=context.settings.reuse.recompute_threshold,
        )
        for stage in decision.stages:
            self._record.stage(stage)
        if decision.drop is not None:
            self._record.dropped(decision.drop)
        return decision

    def keep(
        self, prepared: Prepared, sent: Dispatch, handle: dict[str, object] | None, reply: Reply | None, answer_id: str
    ) -> asyncio.Future[None] | None:
        """Keep D's handle. Called before the last byte is written: the next turn may follow at once, on any router.

        Returns what has to be done before that byte, or None when all is done.
        """
        context, decode = self._context, sent.decode
        if not self._keys or self._tenant is None:
            return None
        fault = judge_handle(handle, context.fleet.hosts())
        if fault is not None or handle is None:
            self._record.not_stored(fault or NotStored.NO_HANDLE)
            forgotten = context.store.forget(self._keys)
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
        result = context.store.put(entry, context.keyring.store_keys(self._tenant, prepared, reply, answer_id), now)
        if isinstance(result, PutResult):
            self._kept(result)
            return None
        return asyncio.ensure_future(self._kept_later(result))

    def _kept(self, result: PutResult) -> None:
        if result is PutResult.UNAVAILABLE:
            self._record.not_stored(result.value)
        else:
            self._record.stored(result.value)

    async def _kept_later(self, result: Awaitable[PutResult]) -> None:
        self._kept(await result)

    # -- one attempt -----------------------------------------------------------------------------
    async def _attempt(self, prepared: Prepared, decision: Decision) -> None:
        """Choose engines and run the legs. Raises LegFailed before, never after, the client has a byte."""
        context = self._context
        holder = decision.entry.holder if decision.entry is not None else None
        chosen = choose_decode(
            self._untried(self._decodes),
            context.loads,
            holder,
            context.settings.limits.decode_overload,
            self._prefill_generations() if prepared.two_legs else None,
        )
        if chosen.engine is None:
            any_decode = any(engine.takes_work for engine in self._decodes)
            raise self._no_engine(ROLE_PREFILL if any_decode else ROLE_DECODE)
        decode = context.member(chosen.engine.key)
        self._record.fields["decode"] = decode.key
        self._record.fields["decode_reason"] = chosen.reason
        # D's place is taken before P begins: a finished prefill must not wait for one while its lease runs (HL-16).
        place = context.loads.open(decode.key)
        try:
            prefilled: Prefilled | None = None
            if prepared.two_legs:
                prefilled = await self._prefill(
                    prepared, decision, self._choose_prefill(prepared, chosen.engine.generation)
                )
            await self._decode(prepared, prefilled, decode)
        finally:
            place.close()

    def _prefill_generations(self) -> frozenset[str]:
        """Generations that a prefill engine is ready for: a decode engine of any other could not be paired (EL-07)."""
        return frozenset([engine.generation for engine in self._prefills if engine.takes_work])

    def _choose_prefill(self, prepared: Prepared, generation: str) -> Member:
        chosen = choose_prefill(self._untried(self._prefills), self._context.loads, generation)
        if chosen.engine is None:
            raise self._no_engine(ROLE_PREFILL)
        self._record.fields["prefill"] = chosen.engine.key
        return self._context.member(chosen.engine.key)

    async def _prefill(self, prepared: Prepared, decision: Decision, member: Member) -> Prefilled:
        context = self._context
        timeouts = context.settings.timeouts
        handle = decision.entry.handle if decision.attach and decision.entry is not None else None
        body = prepared.prefill_body(handle)
        headers = self._record.began(ROLE_PREFILL, member, self._request.headers)
        head = request_head(self._request.path, member, headers, self._request_id, len(body))
        if decision.entry is not None and decision.attach:
            self._record.attached(decision.linked_by)
            context.store.spent(decision.entry)
        started = context.now()
        work = context.loads.open(member.key, prepared.prompt_tokens_estimate)
        member.breaker.sent(started)
        try:
            result = await prefill(
                context.pool, member, head, body, timeouts.pull if handle is not None else timeouts.prefill
            )
        except LegFailed as failure:
            self._blame(member, failure)
            raise
        except BaseException:
            member.breaker.abandoned()
            raise
        finally:
            work.close()
        member.breaker.succeeded()
        self._prefilled_at = context.now()
        self._record.prefilled(result, self._prefilled_at - started, handle is not None)
        return result

    async def _decode(self, prepared: Prepared, prefilled: Prefilled | None, decode: Member) -> None:
        context, responder = self._context, self._responder
        timeouts = context.settings.timeouts
        params = prefilled.params if prefilled is not None else None
        if responder.gone and params is None:
            return
        body = prepared.decode_body(params, retain=bool(self._keys))
        headers = self._record.began(ROLE_DECODE, decode, self._request.headers)
        head = request_head(self._request.path, decode, headers, self._request_id, len(body))
        wait = timeouts.first_byte if prepared.stream else timeouts.answer
        if responder.gone:
            # The client left between the legs. Decode still has to read P's blocks, or they are stranded until the
            # lease ends; no exchange existed for `_client_left` to bound, so the bound is set here.
            wait = timeouts.handoff
        sent = Dispatch(decode, decode.incarnation, decode.witness.identity, context.now())
        keep = functools.partial(self.keep, prepared, sent)
        decode.breaker.sent(context.now())
        try:
            exchange = self._exchange = await context.pool.request(decode.address, head, body, wait)
            if await exchange.head() != 200:
                raise refused("decode", exchange.status, exchange, await exchange.body(), body)
            self._record.accepted()
            if prepared.stream:
                relay = StreamRelay(context, self._record, responder, exchange, self._own_headers, self._prefilled_at)
                self._status = await relay.run(keep)
            else:
                exchange.deadline = context.now() + timeouts.idle
                raw = await exchange.body()
                await send_whole(
                    self._record,
                    responder,
                    exchange,
                    raw,
                    self._own_headers,
                    self._prefilled_at,
                    keep,
                )
        except LegError as error:
            failure = network_failure("decode", error, wait)
            self._blame(decode, failure)
            raise failure from error
        except LegFailed as failure:
            self._blame(decode, failure)
            raise
        except BaseException:
            decode.breaker.abandoned()
            raise
        finally:
            if self._exchange is not None:
                self._exchange.abort()
                self._exchange = None
        if self._status == 502:
            decode.breaker.failed(context.now())
        else:
            decode.breaker.succeeded()

    # -- when things go wrong ------------------------------------------------------------------------
    def _client_left(self) -> None:
        """The socket is gone. Before the first content the hand-off is allowed to finish, within a bound (RP-06)."""
        exchange = self._exchange
        self._context.admission.withdraw(self)
        self._record.client_left(
            "stream" if self._responder.started else "decode" if exchange is not None else "prefill"
        )
        if exchange is None:
            return
        if self._responder.started or not self._two_legs:
            exchange.abort()
        else:
            exchange.deadline = min(exchange.deadline, self._context.now() + self._context.settings.timeouts.handoff)

    def _untried(self, engines: tuple[Engine, ...]) -> tuple[Engine, ...]:
        """Leave out engines that failed this turn, unless there are no others."""
        rest = tuple(engine for engine in engines if engine.key not in self._avoid)
        return rest if any(engine.takes_work for engine in rest) else engines

    def _blame(self, member: Member, failure: LegFailed) -> None:
        """Count a failed leg against its engine, and look at the engine at once when it could not be reached."""
        self._avoid.add(member.key)
        if failure.engine_fault:
            member.breaker.failed(self._context.now())
        else:
            member.breaker.abandoned()
        if failure.reason in _UNREACHED:
            self._context.suspect(member, gone=failure.reason == Failure.CONNECT.value)

    def _no_engine(self, role: str) -> LegFailed:
        """No engine of a role can take the turn; trying again now would find none either."""
        members = self._context.fleet.of_role(role)
        starting = any(not member.ready and member.incarnation == 0 for member in members)
        make = errors.engine_not_ready if starting else errors.no_engine
        return LegFailed(role, "no_engine", make(role, RETRY_AFTER_SECONDS), retryable=False, engine_fault=False)

    def _give_up(self, failure: LegFailed) -> None:
        if self._responder.gone or self._responder.finished:
            return
        if failure.verbatim is None or self._responder.started:
            raise failure.answer
        self._status, headers, body = failure.verbatim
        self._responder.send(self._status, [*headers, *self._own_headers], body)

    def _answer(self, error: ApiError) -> None:
        self._status = error.status
        responder = self._responder
        if responder.gone or responder.finished:
            return
        if responder.started:
            responder.end(error_event(error), close=True)
        else:
            responder.send_error(error, self._own_headers)
