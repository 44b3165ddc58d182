"""The operator's metrics page has exactly the metrics that docs/metrics.md lists."""

from __future__ import annotations

import re
from pathlib import Path

import aiohttp

from pd_operator.shell.health import Sites, Vitals
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.wakeups import Wakeups
from support import promtool

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([a-z_]+)` \| (?:counter|gauge|histogram) ", re.MULTILINE)


async def test_what_is_exposed_is_what_is_listed() -> None:
    sites = Sites(Vitals(lambda: 0.0, 300.0, Wakeups(lambda: 0.0)), Metrics())
    await sites.start(("127.0.0.1", 0), ("127.0.0.1", 0))
    try:
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{sites.ports[1]}/metrics"
            async with session.get(url) as response:
                page = await response.text()
    finally:
        await sites.stop()
    exposed = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    assert {name for name in exposed if not name.endswith("_created")} == set(
        ROW.findall(PAGE.partition("## Operator")[2])
    )
    assert promtool.run("check", "metrics", text=page) == (0, "")
