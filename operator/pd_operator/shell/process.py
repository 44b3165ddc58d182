"""One process of the operator: one event loop, kopf beside the workers, the complete looks and the router questions.

Whatever ends first ends the process; the kubelet starts it again, and nothing is lost because nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import kopf

from pd_operator.core.observed_kinds import DEPLOYMENTS
from pd_operator.shell.api import ApiError, ClusterApi
from pd_operator.shell.ending import Ending
from pd_operator.shell.handlers import make_registry, make_settings
from pd_operator.shell.health import Sites
from pd_operator.shell.kube_api import KubeApi
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.options import Options
from pd_operator.shell.run import Operator

logger = logging.getLogger(__name__)


class CrdMissing(Exception):
    """The cluster does not know PDDeployments."""


class WatchesEnded(Exception):
    """kopf has ended or failed; only a new process has watches again."""


async def run_operator(options: Options) -> None:
    """Serve until SIGTERM.

    Raises:
        CrdMissing: when the custom resource definition is not installed.
        ApiError: when the API server can't be used at the start.
        OSError: when a port for health or metrics is taken.
        WatchesEnded: when kopf has ended.
        asyncio.CancelledError: when SIGTERM came before it served.
    """
    ending = Ending()
    main = asyncio.current_task()
    assert main is not None
    ending.heed_signals(main.cancel)
    metrics = Metrics()
    api = await KubeApi.connect(options.request_timeout, metrics)
    try:
        await _check_crd(api, options)
        operator = Operator(options, api, metrics)
        sites = Sites(operator.vitals, metrics)
        await sites.start(options.health, options.metrics)
        try:
            await operator.look_at_everything()
            await _serve(operator, options, ending)
        finally:
            await sites.stop()
    finally:
        await api.close()


async def _check_crd(api: ClusterApi, options: Options) -> None:
    """Is there anything to serve? One namespace that answers is enough."""
    refused: ApiError | None = None
    for namespace in options.namespaces or (None,):
        try:
            await api.list(DEPLOYMENTS, namespace, "")
        except ApiError as error:
            if error.status == 404:
                raise CrdMissing(f"the cluster does not serve {DEPLOYMENTS.plural}.{DEPLOYMENTS.group}") from error
            if error.status != 403:
                raise
            refused = refused or error
        else:
            return
    if refused is not None:
        raise refused


async def _serve(operator: Operator, options: Options, ending: Ending) -> None:
    tasks = [asyncio.create_task(operator.work(), name=f"worker {n}") for n in range(options.workers)]
    tasks.append(asyncio.create_task(operator.resync(), name="resync"))
    tasks.append(asyncio.create_task(operator.polls.run(), name="router polls"))
    known = asyncio.all_tasks()
    stopping = asyncio.Event()
    roots = await kopf.spawn_tasks(
        registry=make_registry(operator.saw),
        settings=make_settings(options.request_timeout),
        standalone=True,
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        stop_flag=stopping,
    )
    ending.heed_signals(stopping.set)  # kopf has set handlers of its own, which do nothing while it ends by itself.
    watches = asyncio.create_task(kopf.run_tasks(roots, ignored=known), name="watches")
    logger.info("serving %s", ", ".join(options.namespaces) or "all namespaces")
    try:
        # Its single tasks as well: what runs them may never return once one of them has failed.
        done, _ = await asyncio.wait({*tasks, *roots, watches}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.is_set():
            _raise_what_ended(done, frozenset(tasks))
    except BaseException as error:
        operator.vitals.ends(f"ending: {error}")
        raise
    finally:
        ending.begin()
        stopping.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, watches, return_exceptions=True)


def _raise_what_ended(done: Iterable[asyncio.Task[Any]], own: frozenset[asyncio.Task[Any]]) -> None:
    for task in done:
        if task in own:
            task.result()
            continue
        error = None if task.cancelled() else task.exception()
        message = f"the watches have ended: {task.get_name()}: {error or 'no error'}"
        logger.error("%s", message)
        raise WatchesEnded(message) from error
