"""Every metric and label in dashboards and alerts is one that the programs have, and every monitor finds a port."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from pd_operator.core.choices import Role
from pd_operator.core.names import engine_labels, router_labels
from pd_operator.core.render_children import render_children
from pd_operator.core.render_context import RenderContext
from support import promtool
from support.charts import CHART, only, render
from support.pddeployments import deployment

LABELS = {"labels": {"release": "prom"}}
ON: Final[dict[str, Any]] = {
    "metrics": {
        "serviceMonitor": {"enabled": True, **LABELS},
        "podMonitor": {"enabled": True, **LABELS},
        "prometheusRule": {"enabled": True, **LABELS},
        "dashboards": {"enabled": True},
    }
}
TARGET: Final = {"namespace", "pod", "pdserving_dev_pddeployment", "pdserving_dev_role"}
"""Labels that Prometheus adds because of the chart's monitors."""

SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}
WORDS: Final = {"and", "or", "unless", "on", "by", "bool"}


# --- what there is ----------------------------------------------------------------------------------------------------


def samples(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Labels by the name of each series."""
    found: dict[str, set[str]] = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            source = collector if isinstance(collector, MetricWrapperBase) else family
            labels = set(getattr(source, "_labelnames", ()))
            for suffix in SUFFIXES[family.type]:
                found[f"{family.name}{suffix}"] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


PAGE: Final = runpy.run_path(str(CHART.parents[1] / "docs" / "scripts" / "metrics_page.py"))
SERIES: Final = (
    samples(PAGE["operator_registry"]())
    | samples(PAGE["router_metrics"]().registry)
    | {"vllm:kv_cache_usage_perc": {"engine", "model_name"}}
)
"""vLLM's own beside ours."""


def test_the_catalogue_is_not_empty() -> None:
    assert SERIES["pd_router_ttft_seconds_bucket"] == {"le"}
    assert SERIES["pd_operator_writes_total"] == {"kind", "why"}
    assert SERIES["pd_router_engines"] == {"role", "state"}
    assert "process_resident_memory_bytes" in SERIES


# --- what is asked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """One expression: where it stands, its text, and the labels that its legend or texts show."""

    where: str
    text: str
    shown: frozenset[str]


def dashboard_queries() -> Iterator[Query]:
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                shown = frozenset(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                yield Query(f"{path.stem}: {panel['title']}: {target['refId']}", target["expr"], shown)


def alerts() -> list[dict[str, Any]]:
    text = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def alert_queries() -> Iterator[Query]:
    for rule in alerts():
        texts = " ".join(rule["annotations"].values())
        shown = frozenset(re.findall(r"\$labels\.(\w+)", texts))
        yield Query(rule["alert"], rule["expr"], shown)


QUERIES: Final = [*dashboard_queries(), *alert_queries()]


@dataclass(frozen=True)
class Asked:
    """Names in an expression: series with the labels that they are selected by, and labels that are kept or joined."""

    selected: Mapping[str, frozenset[str]]
    grouped: frozenset[str]


def asked(text: str) -> Asked:
    """Read an expression as far as names go; Prometheus' own parser has accepted the grammar."""
    # A label that is copied to another name is no selection, and times are no names.
    text = re.sub(r'label_replace\(([^,]+)(?:, *"[^"]*"){4}\)', r"\1", text)
    text = re.sub(r"\boffset \w+", " ", text)
    grouped = {label for inner in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", text) for label in re.findall(r"\w+", inner)}
    rest = re.sub(r"\b(?:by|on)\s*\([^)]*\)", " ", text)
    selected: dict[str, frozenset[str]] = {}
    for name, inner in re.findall(r"([a-zA-Z_][\w:]*)\{([^}]*)\}", rest):
        selected[name] = frozenset(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inner))
    rest = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b[0-9.]+(e[0-9]+)?\b", " ", rest)
    for name, call in re.findall(r"([a-zA-Z_][\w:]*)(\s*\()?", rest):
        if not call and name not in WORDS:
            selected.setdefault(name, frozenset())
    return Asked(selected, frozenset(grouped))


def test_expressions_are_read_right() -> None:
    found = asked('sum by (a, b) (rate(x_total{c=~"d", e!="f"}[5m])) / 2 and on (g) histogram_quantile(0.5, y) > 4e6')
    assert found.selected == {"x_total": {"c", "e"}, "y": frozenset()}
    assert found.grouped == {"a", "b", "g"}


def test_prometheus_accepts_what_dashboards_ask(tmp_path: Path) -> None:
    """As rules, since its tool reads queries only there."""
    variables = {"$namespace": "llm|prod", "$deployment": ".*"}
    rules = []
    for number, query in enumerate(dashboard_queries()):
        text = query.text
        for name, value in variables.items():
            text = text.replace(name, value)
        assert "$" not in text
        rules.append({"record": f"query:{number}", "expr": text})
    path = tmp_path / "queries.yaml"
    path.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")
    code, said = promtool.run("check", "rules", str(path))
    assert code == 0, said
    assert f"{len(rules)} rules found" in said


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.where)
def test_every_name_exists(query: Query) -> None:
    found = asked(query.text)
    assert found.selected
    for name, labels in found.selected.items():
        assert name in SERIES
        assert labels <= SERIES[name] | TARGET, name
    everywhere = set().union(*(SERIES[name] for name in found.selected)) | TARGET
    assert found.grouped <= everywhere
    # What is aggregated away can't be shown.
    kept = found.grouped if "by (" in query.text else everywhere
    assert query.shown <= kept


def test_rates_are_of_counters_only() -> None:
    for query in QUERIES:
        for name in re.findall(r"\b(?:rate|increase)\(([a-zA-Z_]\w*)", query.text):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), query.where


def test_values_of_labels_exist() -> None:
    """Those with a closed set that an expression names."""
    closed = {**PAGE["router_metrics"]().closed, "pd_operator_reconciles.result": ("failed",),
              "pd_operator_resyncs.result": ("complete",)}  # fmt: skip
    seen = 0
    for query in QUERIES:
        for name, inner in re.findall(r"([a-zA-Z_][\w:]*)\{([^}]*)\}", query.text):
            for label, operation, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', inner):
                values = closed.get(f"{name.removesuffix('_total')}.{label}", ())
                if label in TARGET or value.startswith("$"):
                    continue
                seen += 1
                assert any(re.fullmatch(value, one) if operation == "=~" else value == one for one in values), query
    assert seen >= 8


def test_every_alert_says_what_to_do() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names)) > 5
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["annotations"]["description"].endswith(".")
        assert rule["for"]


def test_dashboards_are_imported_under_ids_of_their_own() -> None:
    found = [json.loads(text) for text in only(render(ON), "ConfigMap")["data"].values()]
    assert len({one["uid"] for one in found}) == len(found) == 2
    for one in found:
        assert {variable["name"] for variable in one["templating"]["list"]} >= {"datasource"}
        used = set(re.findall(r"\$(\w+)", " ".join(query.text for query in dashboard_queries())))
        assert used == {"namespace", "deployment"}


# --- who is scraped ---------------------------------------------------------------------------------------------------


def monitored(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in render(ON) if one["kind"] == kind}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Kubernetes' label selectors, as far as the chart uses them."""
    checks = [labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()]
    for one in selector.get("matchExpressions", ()):
        assert one["operator"] in ("Exists", "In")
        found = labels.get(one["key"])
        checks.append(found is not None and (one["operator"] == "Exists" or found in one["values"]))
    return all(checks)


def test_the_service_monitor_finds_the_service_and_its_port() -> None:
    [monitor] = monitored("ServiceMonitor").values()
    service = only(render(ON), "Service")
    assert selects(monitor["spec"]["selector"], service["metadata"]["labels"])
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["honorLabels"] is True, "pd_operator_last_reconcile_timestamp_seconds has a namespace of its own"


def test_the_pod_monitors_find_engines_and_routers_and_their_ports() -> None:
    child = deployment(("spec.engine.image", "x"))
    monitors = monitored("PodMonitor")
    engines, routers = monitors["pd-operator-engines"]["spec"], monitors["pd-operator-routers"]["spec"]
    operator = only(render(ON), "Deployment")["spec"]["template"]["metadata"]["labels"]
    for role in Role:
        assert selects(engines["selector"], engine_labels(child, role, "g"))
        assert not selects(routers["selector"], engine_labels(child, role, "g"))
    assert selects(routers["selector"], router_labels(child))
    assert not selects(engines["selector"], router_labels(child))
    assert not selects(engines["selector"], operator)
    assert not selects(routers["selector"], operator)
    ports = {"StatefulSet": engines, "Deployment": routers}
    for made in render_children(child, RenderContext("u", "r", "c")):
        if made["kind"] in ports:
            pod = made["spec"]["template"]["spec"]
            named = {port["name"] for one in pod["containers"] for port in one["ports"]}
            assert ports[made["kind"]]["podMetricsEndpoints"][0]["port"] in named


def test_pod_monitors_look_where_the_operator_serves() -> None:
    teams = {"watch": {"scope": "Namespaces", "namespaces": ["team-a"]}}
    for sets, expected in (((ON,), {"any": True}), ((ON, teams), {"matchNames": ["team-a"]})):
        for one in render(*sets):
            if one["kind"] == "PodMonitor":
                assert one["spec"]["namespaceSelector"] == expected


def test_labels_by_which_prometheus_selects_are_on_all_of_them() -> None:
    for one in render(ON):
        if one["apiVersion"] == "monitoring.coreos.com/v1":
            assert one["metadata"]["labels"]["release"] == "prom"


def test_the_rules_of_the_object_are_those_of_the_file() -> None:
    assert [
        rule for group in only(render(ON), "PrometheusRule")["spec"]["groups"] for rule in group["rules"]
    ] == alerts()
