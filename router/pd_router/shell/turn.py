"""One turn from request to answer, top to bottom.

The order of work is visible in `Turn._serve` and `Attempts.run`: find a handle, choose engines, prefill, decode, keep
the new handle; and the rule for failures is one loop: before the first byte has reached the client a turn may start
again, without the handle and on other engines where there are any; after that byte it can only end. What decides is in
`core`, one attempt in `attempt`, how the answer is relayed in `relay`, what is counted in `record`.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from pd_router.core import errors
from pd_router.core.capabilities import BY_RELEASE
from pd_router.core.dialect import DIALECTS
from pd_router.core.errors import ApiError
from pd_router.core.fields import Api
from pd_router.core.policy import Decision
from pd_router.core.request import Prepared, prepare
from pd_router.core.wishes import read_wish
from pd_router.shell.admission import Withdrawn
from pd_router.shell.attempt import Attempts
from pd_router.shell.context import Context
from pd_router.shell.keeper import Keeper, Recalling
from pd_router.shell.legs import CLIENT_LEFT, GONE, LegFailed
from pd_router.shell.record import TurnRecord
from pd_router.shell.request_reader import Request
from pd_router.shell.responder import Responder
from pd_wire.names import ROLE_DECODE, ROLE_PREFILL

log = logging.getLogger("pd_router.turn")

FAILURES_PER_ROLE = 2
"""The second failure of a role ends a turn. One that happened with a handle attached is for free, and a prefill engine
and a decode engine may be in trouble at one time."""
RETRY_PAUSE_SECONDS = 0.1
"""Before a retry that can only go where it just failed."""


class Turn:
    """State of one turn."""

    def __init__(self, context: Context, api: Api, request: Request, responder: Responder) -> None:
        self._context = context
        self._api = api
        self._dialect = DIALECTS[api]
        self._request = request
        self._responder = responder
        self._request_id = context.request_id(request.headers)
        self._own_headers = [(b"x-request-id", self._request_id.encode("latin-1", "replace"))]
        self._record = TurnRecord(context, self._request_id, api.value, request)
        self._status = 200
        self._keeper = Keeper(context, self._record, request.tenant)
        self._attempts = Attempts(
            context, api, request, responder, self._record, self._keeper, self._request_id, self._own_headers
        )

    async def run(self) -> None:
        """Answer the request, whatever happens."""
        context, responder = self._context, self._responder
        responder.on_gone = self._client_left
        admitted = False
        try:
            prepared = await self._prepare()
            await context.admission.enter(self, self._request.tenant)
            admitted = True
            self._record.admitted()
            if responder.gone:
                raise Withdrawn
            await self._serve(await self._fitted(prepared))
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
            self._attempts.abort()
            self._keeper.close()
            responder.on_gone = None  # without this cycle a turn's memory is free at once, and the next one's is warm
            if responder.gone and not responder.finished and self._status == 200:
                self._status = CLIENT_LEFT
            self._record.finish(self._status)

    async def _prepare(self) -> Prepared:
        """Check and open the body; once more where items of earlier responses had to be asked for."""
        request, models = self._request, self._context.models()
        self._keeper.wish = read_wish(request.headers)
        try:
            return prepare(self._api, request.body, request.headers, models, recall=self._keeper.recall)
        except Recalling as recalling:
            items = await recalling.answer
            return prepare(self._api, request.body, request.headers, models, recall=lambda _: items)

    async def _fitted(self, prepared: Prepared) -> Prepared:
        """The turn as the engines' endpoints can carry it (RP-19)."""
        if self._api not in BY_RELEASE:
            return prepared
        carried = await self._context.versions.carried(self._context.fleet.of_role(ROLE_DECODE), self._api)
        self._keeper.brings_handle = carried.answer(prepared.stream)
        if carried.request or not prepared.two_legs:
            return prepared
        return replace(prepared, two_legs=False, link_fault="this release's endpoint carries no params")

    async def _serve(self, prepared: Prepared) -> None:
        """Try until the client has an answer or there is nothing left to try."""
        keeper, attempts = self._keeper, self._attempts
        keeper.identify(prepared)
        clean = not keeper.keys
        failures = {ROLE_PREFILL: 0, ROLE_DECODE: 0}
        self._context.retries.turn()
        while True:
            found = None if clean else await keeper.open()
            if self._responder.gone:
                raise Withdrawn  # while a shared store was asked, or before another attempt
            attempts.look(two_legs=prepared.two_legs)
            decision = Decision.recompute() if clean else keeper.find(prepared, found, attempts.decodes)
            self._record.fields["attempts"] += 1
            planned = attempts.plan(prepared, decision)
            attached = planned.decision.attach
            try:
                self._status = await attempts.run(prepared, planned)
                return
            except LegFailed as failure:
                self._record.failed(failure, attached)
                failures[failure.leg] += 0 if attached else 1
                if failures[failure.leg] >= FAILURES_PER_ROLE or not self._may_try_again(failure, attached):
                    self._give_up(failure)
                    return
                clean = True  # what was taken is spent, whatever became of it
                self._record.retried(failure)
                how = " without its handle" if attached else ""
                log.warning("turn %s: %s, trying again%s", self._request_id, failure, how)
                if failure.reason not in GONE and not attempts.has_untried(failure.leg):
                    await asyncio.sleep(RETRY_PAUSE_SECONDS)

    def _may_try_again(self, failure: LegFailed, attached: bool) -> bool:
        """Never after the first byte, never what would fail again, and within the budget where engines are at work."""
        if not failure.retryable or self._responder.gone or self._responder.started:
            return False
        if attached or failure.reason in GONE or self._context.retries.take():
            return True
        self._record.not_retried()
        return False

    def _client_left(self) -> None:
        """The socket is gone."""
        self._context.admission.withdraw(self)
        self._record.client_left("stream" if self._responder.started else self._attempts.leg or "prefill")
        self._attempts.client_left()

    def _give_up(self, failure: LegFailed) -> None:
        if self._responder.gone or self._responder.finished:
            return
        if failure.verbatim is None or self._responder.started or self._context.guard.is_own_fault(failure.status):
            raise failure.answer
        self._status, headers, body = failure.verbatim
        shown = self._dialect.error_body(body, self._status)
        self._responder.send(self._status, [*headers, *self._own_headers], shown)

    def _answer(self, error: ApiError) -> None:
        self._status = error.status
        responder = self._responder
        if responder.gone or responder.finished:
            return
        if responder.started:
            responder.end(self._dialect.error_event(error.body()), close=True)
        else:
            shown = self._dialect.error_body(error.body(), error.status)
            responder.send_error(error, self._own_headers, body=shown)
