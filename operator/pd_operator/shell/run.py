"""Everything that one operator holds, put together: the mirror, the workers, the complete looks, the router questions.

`process` starts it and lets it end.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import time
from collections.abc import Callable
from typing import Final

from pd_operator.core.observed_kinds import Kind
from pd_operator.core.render_context import RenderContext
from pd_operator.shell.api import ApiError, ClusterApi
from pd_operator.shell.carry_out import Hands
from pd_operator.shell.handlers import selector_of, watched_kinds
from pd_operator.shell.health import Vitals
from pd_operator.shell.lost import LostNamespaces
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.mirror import Mirror
from pd_operator.shell.options import Options
from pd_operator.shell.reconcile import A_WHILE, Interrupted, Reconciler, Result
from pd_operator.shell.rivals import Rivals
from pd_operator.shell.router_poll import RouterPoll
from pd_operator.shell.wakeups import Key, Wakeups

logger = logging.getLogger(__name__)

SECOND_LOOK: Final = 15.0
"""Seconds after the start; the watches begin within one or two."""


LOST_LOOK: Final = 30.0
"""Seconds between two looks whether a namespace is back."""


class Operator:
    """Everything that one process holds."""

    def __init__(
        self, options: Options, api: ClusterApi, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._api = api
        self._metrics = metrics
        self.mirror = Mirror()
        self.wakeups = Wakeups(clock)
        self.vitals = Vitals(clock, options.resync, self.wakeups)
        self.polls = RouterPoll(self.mirror, self.wakeups.wake, options.router_poll, metrics, clock)
        self._lost = LostNamespaces(options.namespaces, metrics)
        self.vitals.lost = self._lost.names
        self._hands = Hands(api, self.mirror, metrics)
        self._rivals = Rivals(options.identity, clock, metrics)
        self._reconciler = Reconciler(
            api,
            self.mirror,
            self._hands,
            self._context,
            lambda: self.polls.answers,
            _rfc3339_now,
            self._rivals,
        )
        metrics.deployments.set_function(lambda: len(self.mirror.keys()))
        metrics.waiting.set_function(lambda: len(self.wakeups))

    async def look_at_everything(self) -> None:
        """List every kind into the mirror, then wake every PDDeployment. A listed namespace that is gone or forbidden
        is told and left out.

        Raises:
            ApiError: the first one of lists that failed otherwise; all others were made.
        """
        failure: ApiError | None = None
        for namespace in self._options.namespaces or (None,):
            try:
                await self._look_at(namespace)
            except ApiError as error:
                failure = failure or error
        self._hands.forget_children_except(self.mirror.child_uids())
        if failure is not None:
            raise failure

    async def look_for_the_lost(self) -> None:
        """Look whether namespaces are back that were gone or forbidden."""
        for namespace in tuple(self._lost.names):
            with contextlib.suppress(ApiError):  # not back yet
                await self._look_at(namespace)

    async def _look_at(self, namespace: str | None) -> None:
        for kind in watched_kinds():
            try:
                items, version = await self._api.list(kind, namespace, selector_of(kind))
            except ApiError as error:
                if error.status != 403 or namespace is None:
                    raise
                self._lose(namespace, error)
                return
            for key in self.mirror.listed(kind, namespace, items, version):
                self.wakeups.wake(key)
        if namespace is not None and self._lost.find(namespace):
            self.mirror.take_unconfirmed(namespace)  # Watches that are still open don't bring again what was forgotten.
        for key in self.mirror.keys():  # noqa: SIM118  a method of its own, no dict
            if namespace in (None, key.namespace):
                self.wakeups.wake(key)

    def _lose(self, namespace: str, error: ApiError) -> None:
        self._lost.lose(namespace, error)
        for key in self.mirror.forget_namespace(namespace):
            self.wakeups.wake(key)

    def saw(self, kind: Kind, raw: object, gone: bool) -> None:
        """Take in one watch event."""
        assert isinstance(raw, dict)
        key = self.mirror.see(kind, raw, gone=gone)
        if key is not None:
            self.wakeups.wake(key)

    async def work(self) -> None:
        """One worker, for ever."""
        while True:
            await self.work_once()

    async def work_once(self) -> None:
        """Wait until an object is due and reconcile it."""
        key = await self.wakeups.next()
        with self._metrics.reconcile_seconds.time():
            await self._work_on(key)

    async def resync(self) -> None:
        """Look at everything again and again.

        Once soon after the start: what vanished between the first look and the start of the watches, no watch tells.
        """
        await asyncio.sleep(min(SECOND_LOOK, self._options.resync))
        while True:
            await self.resync_once()
            left = self._options.resync
            while left > 0.0:
                pause = min(left, LOST_LOOK)
                await asyncio.sleep(pause)
                left -= pause
                await self.look_for_the_lost()

    async def resync_once(self) -> None:
        """One complete look, and the judgement whether the watches have brought what the last one found."""
        missed = self.mirror.take_unconfirmed()
        if missed:
            self._metrics.missed.inc(len(missed))
            logger.warning("no watch has brought %d changes, such as %s", len(missed), missed[0])
        try:
            await self.look_at_everything()
            self._metrics.resyncs.labels("complete").inc()
        except ApiError as error:
            self._metrics.resyncs.labels("failed").inc()
            logger.warning("looking at everything failed: %s", error)
        self.vitals.looked(len(missed))

    async def _work_on(self, key: Key) -> None:
        try:
            result = await self._reconciler.reconcile(key)
        except (Interrupted, ApiError) as error:
            progress = isinstance(error, Interrupted) and error.progress
            delay = self.wakeups.failed(key, error.retry_after, progress=progress)
            self._metrics.reconciles.labels("failed").inc()
            logger.warning("%s: %s; trying again in %.1f s", key, error, delay)
            return
        except Exception:  # one object's surprise must not stop the others
            delay = self.wakeups.failed(key)
            self._metrics.reconciles.labels("failed").inc()
            logger.exception("%s: unexpected failure; trying again in %.1f s", key, delay)
            return
        self._metrics.reconciles.labels(result.value).inc()
        if result is Result.GONE:
            self._forget(key)
        else:
            self._metrics.last_reconcile.labels(*key).set(time.time())
        if result in (Result.WAITING, Result.SOON):
            self.wakeups.failed(key, progress=result is Result.SOON)
        else:
            self.wakeups.done(key)
        if result is Result.STANDING_BACK:
            self.wakeups.wake(key, self._rivals.wait(key))
        elif result is Result.BEGINNING:
            self.wakeups.wake(key, A_WHILE)

    def _forget(self, key: Key) -> None:
        if self.mirror.deployment(key) is None:
            self.wakeups.forget(key)
            self._rivals.forget(key)
            with contextlib.suppress(KeyError):
                self._metrics.last_reconcile.remove(*key)

    def _context(self, uid: str) -> RenderContext:
        return RenderContext(
            uid=uid,
            router_image=self._options.router_image,
            connector_image=self._options.connector_image,
            image_pull_policy=self._options.image_pull_policy,
            image_pull_secrets=self._options.image_pull_secrets,
            operator_namespace=self._options.operator_namespace,
            identity=self._options.identity,
        )


def _rfc3339_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
