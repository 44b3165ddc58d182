"""docs/metrics.md is what the programs' registries say. A running router is compared in tests/component/router."""

from __future__ import annotations

import runpy
from pathlib import Path

PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "scripts" / "metrics_page.py"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE["PAGE"].read_text(encoding="utf-8") == PAGE["page"](), "run `make metrics`"


def test_names_follow_the_conventions() -> None:
    for registry, prefix in (
        (PAGE["router_metrics"]().registry, "pd_router_"),
        (PAGE["operator_registry"](), "pd_operator_"),
    ):
        for one in PAGE["families"](registry):
            assert one.name.startswith((prefix, "process_")), one
            assert one.text, one
            assert (one.kind == "counter") is one.name.endswith("_total"), one
            if one.kind == "histogram":
                assert one.name.endswith("_seconds"), one
            for word in ("milliseconds", "_ms", "kilobytes", "percent"):
                assert word not in one.name, one
