"""`pdctl top`: what routers do now, in a terminal, as a table or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import aiohttp
import typer
from rich.console import Console
from rich.live import Live

from pdctl.core.top_figures import Figures, figures
from pdctl.core.top_window import Look, Window, merged
from pdctl.shell.top_screen import screen
from pdctl.shell.top_source import AdminSource, Reading, Source, SourceError

DEFAULT_ADMIN: Final = "http://127.0.0.1:9000"
LIVE_WINDOW: Final = 60.0
PLAIN_WIDTH: Final = 160
"""Characters of a line where there is no terminal to fit."""


def top(
    admin: Annotated[
        list[str] | None, typer.Option(help=f"A router's admin URL; repeatable. Default: {DEFAULT_ADMIN}.")
    ] = None,
    name: Annotated[str, typer.Option(help="A PDDeployment in a cluster, instead of --admin.")] = "",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Of the PDDeployment.")] = "default",
    kubeconfig: Annotated[str, typer.Option(help="With --name. Default: $KUBECONFIG, else ~/.kube/config.")] = "",
    context: Annotated[str, typer.Option(help="With --name. Default: the current one.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
    window: Annotated[
        float | None,
        typer.Option(
            help="Seconds that counts and times are of. Default: 60; with --once and --json 0, since the start.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    engines: Annotated[bool, typer.Option(help="Ask the engines themselves for their KV usage.")] = True,
) -> None:
    """Show the reuse funnel, the engines and the times of turns, over the last seconds, until Ctrl-C."""
    urls = admin or ([] if name else [DEFAULT_ADMIN])
    if name and admin:
        raise typer.BadParameter("is instead of --admin; give one of them", param_hint="--name")
    cluster = Cluster(namespace, name, kubeconfig, context) if name else None
    single = once or as_json
    if window is None:
        window = 0.0 if single else LIVE_WINDOW
    try:
        _check(urls, window, interval, single=single)
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(cluster or urls, window, interval, single=single, as_json=as_json, ask_engines=engines))
    except SourceError as error:
        typer.echo(f"pdctl top: {error}", err=True)
        raise typer.Exit(1) from None


class History:
    """The looks of the last seconds, by router."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._looks: dict[str, deque[Look]] = {}

    def add(self, reading: Reading) -> Figures:
        """Remember a reading; the figures since the look that is as old as the window, or as old as there is."""
        windows = []
        for name, look in reading.looks.items():
            looks = self._looks.setdefault(name, deque())
            looks.append(look)
            while len(looks) > 1 and looks[1].at <= look.at - self._seconds:
                looks.popleft()
            windows.append(Window(looks[0] if len(looks) > 1 else None, look))
        return figures(merged(windows), reading.fleets, reading.kv_usage)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a PDDeployment is, and with which credentials to look at it."""

    namespace: str
    name: str
    kubeconfig: str
    context: str


async def _run(
    where: Cluster | list[str], window: float, interval: float, *, single: bool, as_json: bool, ask_engines: bool
) -> None:
    async with _source(where, ask_engines=ask_engines) as source:
        if single:
            found = await _look_once(source, window)
            if as_json:
                typer.echo(json.dumps(as_object(found), indent=2))
            else:
                _console().print(screen(found))
        else:
            await _watch(source, window, interval)


@contextlib.asynccontextmanager
async def _source(where: Cluster | list[str], *, ask_engines: bool) -> AsyncIterator[Source]:
    if isinstance(where, list):
        # Proxies are for the world outside; an admin port is not there.
        async with aiohttp.ClientSession(trust_env=False) as session:
            yield AdminSource(session, where, ask_engines=ask_engines)
        return
    # Imported here because the client takes half a second.
    from pdctl.shell.top_cluster import open_cluster

    async with open_cluster(where.kubeconfig, where.context, where.namespace, where.name, ask_engines) as source:
        yield source


async def _look_once(source: Source, window: float) -> Figures:
    history = History(window)
    found = history.add(await source.read())
    if window > 0:
        await asyncio.sleep(window)
        found = history.add(await source.read())
    return found


async def _watch(source: Source, window: float, interval: float) -> None:
    history = History(window)
    found = history.add(await source.read())
    with Live(screen(found), console=_console(), auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval)
            trouble = ""
            try:
                found = history.add(await source.read())
            except SourceError as error:
                trouble = str(error)
            live.update(screen(found, trouble), refresh=True)


def as_object(found: Figures) -> dict[str, Any]:
    """What `--json` prints."""
    return {**asdict(found), "pulled_share": found.pulled_share}


def _check(urls: list[str], window: float, interval: float, *, single: bool) -> None:
    for url in urls:
        if not _is_url(url):
            raise typer.BadParameter(f"{url!r} must be a URL such as {DEFAULT_ADMIN}", param_hint="--admin")
    least = 0.0 if single else 1.0
    if not least <= window <= 86400:
        raise typer.BadParameter(f"must be from {least:g} to 86400 seconds, got {window:g}", param_hint="--window")
    if not 0.2 <= interval <= 3600:
        raise typer.BadParameter(f"must be from 0.2 to 3600 seconds, got {interval:g}", param_hint="--interval")


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # brackets that are not closed, a port that is none
        return False


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
