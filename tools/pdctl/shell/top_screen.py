"""How `pdctl top` looks: a few tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdctl.core.top_figures import Engine, Figures, Latency

MOST_DROPS = 6
TEXT = frozenset({"", "time", "reuse", "why turns left", "engine", "state"})
"""Titles of columns that hold no figures."""
NAMES = {
    "queue": "queue",
    "prefill": "prefill",
    "handoff": "hand-off",
    "first_token": "first token",
    "ttft": "= time to first token",
    "turn": "whole turn",
}


def screen(figures: Figures, trouble: str = "") -> RenderableType:
    """Everything. `trouble`: why the figures are old."""
    parts: list[RenderableType] = [_head(figures)]
    if trouble:
        parts.append(Text(f"no new figures: {trouble}", style="bold red"))
    gap = Text()
    parts += [gap, _latencies(figures), gap, _funnel(figures), _tokens(figures), gap, _engines(figures)]
    return Group(*parts)


def _head(figures: Figures) -> Text:
    over = "since the start" if figures.window_seconds is None else f"last {figures.window_seconds:.0f} s"
    statuses = ", ".join(f"{count} with {status}" for status, count in figures.answers_by_status.items())
    routers = "1 router" if figures.routers == 1 else f"{figures.routers} routers"
    words = [
        f"{routers} ({figures.version}), {over}: {figures.answers} answers" + (f" ({statuses})" if statuses else ""),
        f"{figures.retries} tried again, {figures.inflight} in flight, {figures.queued} queued",
    ]
    if figures.store_up is False:
        words.append("the store of handles can't be reached")
    return Text("; ".join(words))


def _latencies(figures: Figures) -> Table:
    table = _table("time", "p50", "p95", "p99", "turns")
    for part, latency in figures.latency.items():
        table.add_row(NAMES[part], *_times(latency), str(latency.count))
    return table


def _funnel(figures: Figures) -> Table:
    table = _table("reuse", "turns", "of eligible", "why turns left", "turns")
    eligible = figures.funnel["eligible"]
    drops = list(figures.drops.items())[:MOST_DROPS]
    stages = list(figures.funnel.items())
    for place in range(max(len(stages), len(drops))):
        left: tuple[str, str, str] = ("", "", "")
        if place < len(stages):
            stage, count = stages[place]
            left = (stage, str(count), f"{count / eligible:.0%}" if eligible else "–")
        right = (drops[place][0], str(drops[place][1])) if place < len(drops) else ("", "")
        table.add_row(*left, *right)
    return table


def _tokens(figures: Figures) -> Text:
    share = "–" if figures.pulled_share is None else f"{figures.pulled_share:.0%}"
    handles = "?" if figures.handles is None else f"{figures.handles:,}"
    return Text(
        f"{figures.pulled_tokens:,} of {figures.prompt_tokens:,} prompt tokens read back ({share}), "
        f"{figures.cached_tokens:,} not computed; {handles} handles kept"
    )


def _engines(figures: Figures) -> Table:
    table = _table(
        *("", "engine", "state", "turns", "prefill\ntokens", "KV\nused", "handles", "pinned\ntokens", "ok", "failed")
    )
    for one in figures.engines:
        table.add_row(
            one.role[:1].upper(),
            one.engine,
            _state(one),
            str(one.turns),
            f"{one.prefill_tokens:,}",
            "–" if one.kv_usage is None else f"{one.kv_usage:.0%}",
            str(one.handles),
            f"{one.pinned_tokens:,}",
            str(one.legs.get("ok", 0)),
            str(one.legs.get("failed", 0)),
        )
    return table


def _state(engine: Engine) -> Text:
    words = list(_words(engine))
    return Text(", ".join(words), style="green" if words == ["ready"] else "yellow" if engine.ready else "red")


def _words(engine: Engine) -> Iterator[str]:
    yield "draining" if engine.draining else "ready" if engine.ready else "not ready"
    if engine.breaker != "closed":
        yield f"breaker {engine.breaker.replace('_', '-')}"
    if engine.quarantined:
        yield f"{engine.quarantined} pairs quarantined"


def _times(latency: Latency) -> Iterator[str]:
    for value in (latency.p50, latency.p95, latency.p99):
        yield "–" if value is None else f"{value * 1e3:,.0f} ms"


def _table(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        wraps = title in ("engine", "state")  # what may be long; figures are never cut
        table.add_column(title, justify="left" if title in TEXT else "right", no_wrap=not wraps, overflow="fold")
    return table
