"""Write docs/metrics.md from the programs' own registries: `python docs/scripts/metrics_page.py`.

Separate from the programs because it needs both of them. With `--check` nothing is written, and the exit status is 1
when the page is not what it should be.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from pd_operator.shell.metrics import Metrics as OperatorMetrics
from pd_router.__main__ import parse_settings
from pd_router.shell.metrics import OTHER, Metrics
from pd_router.shell.server import Router

PAGE: Final = Path(__file__).parents[1] / "metrics.md"
INLINE: Final = 4
"""Labels with more values than this are listed below the table."""

HEAD: Final = (Path(__file__).parent / "metrics_head.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Family:
    """One metric as people write it in a query."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def families(registry: CollectorRegistry) -> Iterator[Family]:
    """Every metric of a registry, by name; those without a series included."""
    found = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            source = collector if isinstance(collector, MetricWrapperBase) else family
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Family(name, family.type, tuple(getattr(source, "_labelnames", ())), family.documentation)
    yield from sorted(found.values(), key=lambda one: one.name)


def router_metrics() -> Metrics:
    """Everything that a router in a cluster exposes: the composition root's own, not started."""
    flags = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:1", "--discover-kubernetes", "prod/qwen")

    async def compose() -> Metrics:
        return Router(parse_settings(flags)[0]).context.metrics

    return asyncio.run(compose())


def operator_registry() -> CollectorRegistry:
    """Everything that an operator exposes."""
    return OperatorMetrics().registry


def page() -> str:
    """The page as Markdown."""
    router = router_metrics()
    closed = {tuple(name.split(".")): values for name, values in router.closed.items()}
    parts = [HEAD, "## Router\n", *_table(router.registry, closed)]
    longer = {key: values for key, values in closed.items() if len(values) > INLINE}
    if longer:
        parts += ["\n### Values of labels\n", "| metric | label | values |", "| --- | --- | --- |"]
    for (name, label), values in sorted(longer.items()):
        parts.append(f"| `{name}_total` | `{label}` | {', '.join(f'`{value}`' for value in (*values, OTHER))} |")
    parts += ["\n## Operator\n", *_table(operator_registry(), {})]
    return "\n".join(parts) + "\n"


def _table(registry: CollectorRegistry, closed: Mapping[tuple[str, ...], tuple[str, ...]]) -> Iterator[str]:
    yield "| metric | type | labels | what it is |"
    yield "| --- | --- | --- | --- |"
    for one in families(registry):
        labels = []
        for label in one.labels:
            values = closed.get((one.name.removesuffix("_total"), label), ())
            shown = f": {', '.join(values)}" if 0 < len(values) <= INLINE else ""
            labels.append(f"`{label}`{shown}")
        yield f"| `{one.name}` | {one.kind} | {'; '.join(labels) or '–'} | {one.text.rstrip('.')} |"


def main(arguments: list[str]) -> int:
    """Write or check the page."""
    text = page()
    if "--check" in arguments:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("docs/metrics.md is up to date" if same else "docs/metrics.md is out of date: run `make metrics`")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
