"""Prometheus' own evaluator makes each alert fire on the series that it is for, and on nothing that is well.

The rules are those that helm renders. Each case is what is well with some series exchanged; what fires must be that
alert and no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from support import promtool
from support.charts import CHART, HelmError, only, render

RULES: Final = {"metrics": {"prometheusRule": {"enabled": True}}}
MINUTES: Final = 120
"""Of the series. Alerts are looked at `LOOKED_AT` minutes after the start."""
LOOKED_AT: Final = (75, 110)

PAGE: Final = (CHART.parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
OPERATOR: Final = 'namespace="pd-system",pod="pd-operator-0"'
ROUTER: Final = 'namespace="llm",pdserving_dev_pddeployment="qwen",pdserving_dev_role="router",pod="qwen-router-0"'
DECODE: Final = 'namespace="llm",pdserving_dev_pddeployment="qwen",pdserving_dev_role="decode",pod="qwen-decode-0"'
ENGINE: Final = 'role="decode",engine="qwen-decode-0"'
PAIR: Final = 'prefill="qwen-prefill-0",decode="qwen-decode-0",direction="pull"'


def operator(name: str, *labels: str) -> str:
    return f"pd_operator_{name}{{{','.join((OPERATOR, *labels))}}}"


def router(name: str, *labels: str) -> str:
    return f"pd_router_{name}{{{','.join((ROUTER, *labels))}}}"


def status(code: int) -> str:
    return router("requests_total", 'api="chat.completions"', f'status="{code}"')


def stage(name: str) -> str:
    return router("reuse_stage_total", f'stage="{name}"')


def ready(role: str) -> str:
    return router("engines", f'role="{role}"', 'state="ready"')


def ttft(bound: str) -> str:
    return router("ttft_seconds_bucket", f'le="{bound}"')


def breaker(state: str) -> str:
    return router("engine_breaker_state", ENGINE, f'state="{state}"')


def pulls(engine: str, outcome: str) -> str:
    return router("engine_pulls_total", f'engine="{engine}"', f'outcome="{outcome}"')


def flat(value: float, samples: int = MINUTES) -> str:
    return f"{value:g}+0x{samples}"


def grows(by: float, samples: int = MINUTES) -> str:
    return f"0+{by:g}x{samples}"


MEMORY: Final = f"process_resident_memory_bytes{{{OPERATOR}}}"
USAGE: Final = f"vllm:kv_cache_usage_perc{{{DECODE}}}"
LEGS: Final = router("engine_legs_total", ENGINE, 'result="ok"')
TURNS: Final = router("engine_turns", ENGINE)
PINNED: Final = router("pinned_tokens", 'engine="qwen-decode-0"')
RESTARTS: Final = router("engine_incarnations_total", ENGINE)
QUARANTINE: Final = router("pair_quarantined", PAIR)
PULLED, PROMPT, CACHED = (router(f"{name}_tokens_total") for name in ("pulled", "prompt", "cached"))
RETRIES: Final = router("retries_total", 'leg="prefill"', 'reason="timeout"')

WELL: Final[Mapping[str, str]] = {
    operator("deployments"): flat(1),
    operator("reconciles_total", 'result="settled"'): grows(2),
    operator("reconciles_total", 'result="failed"'): flat(3),
    operator("resyncs_total", 'result="complete"'): grows(1),
    operator("namespace_served", 'name="llm"'): flat(1),
    operator("watch_missed_total"): flat(2),
    MEMORY: flat(200e6),
    router("build_info", 'version="1"'): flat(1),
    ready("prefill"): flat(2),
    ready("decode"): flat(2),
    router("discovery_connected"): flat(1),
    status(200): grows(600),
    status(400): grows(40),
    status(502): grows(3),
    status(429): grows(1),
    RETRIES: grows(6),
    ttft("0.5"): grows(570),
    ttft("1"): grows(597),
    ttft("10"): grows(600),
    ttft("+Inf"): grows(600),
    router("ttft_seconds_count"): grows(600),
    stage("eligible"): grows(600),
    stage("attached"): grows(500),
    PULLED: grows(600_000),
    PROMPT: grows(1_000_000),
    CACHED: grows(700_000),
    pulls("qwen-prefill-0", "pulled"): grows(50),
    pulls("qwen-prefill-0", "nothing"): grows(5),
    pulls("qwen-prefill-1", "pulled"): grows(40),
    pulls("qwen-prefill-1", "failed"): grows(1),
    USAGE: flat(0.7),
    PINNED: flat(50_000),
    router("handle_store_up"): flat(1),
    breaker("open"): flat(0),
    breaker("closed"): flat(1),
    TURNS: flat(3),
    LEGS: grows(600),
    RESTARTS: flat(1),
    router("worker_restarts_total"): flat(1),
    router("stale_files"): flat(0),
}
NO_ROUTER: Final = dict.fromkeys((name for name in WELL if name.startswith("pd_router_")), "")


@dataclass(frozen=True)
class Case:
    """Series that are not as when all is well (empty: not there), and the alerts that must fire."""

    name: str
    series: Mapping[str, str]
    fires: tuple[str, ...] = ()
    base: Mapping[str, str] = field(default_factory=lambda: WELL)
    interval: str = "1m"
    at: tuple[int, ...] = LOOKED_AT


def counts(series: str) -> bool:
    """Whether turns make it grow."""
    return series.startswith("pd_router") and ("_total{" in series or "_bucket{" in series or "_count{" in series)


def dip(usual: float, low: float, minute: int = 90, minutes: int = 3) -> str:
    after = MINUTES - minute - minutes
    return f"{flat(usual, minute)} {flat(low, minutes - 1)} {flat(usual, after)}"


FIRING: Final = [
    Case("PDOperatorAbsent", {operator("deployments"): ""}),
    Case("PDOperatorReconcilesFail", {operator("reconciles_total", 'result="failed"'): grows(1)}),
    Case("PDOperatorLooksFail", {operator("resyncs_total", 'result="complete"'): flat(9)}),
    Case("PDOperatorNamespaceLost", {operator("namespace_served", 'name="llm"'): flat(0)}),
    Case("PDOperatorWatchesMiss", {operator("watch_missed_total"): grows(1)}),
    Case("PDOperatorMemory", {MEMORY: flat(480e6)}),
    Case("PDRoutersNotScraped", NO_ROUTER),
    Case("PDNoEngineReady", {ready("decode"): flat(0)}),
    Case("PDRouterBlind", {router("discovery_connected"): flat(0)}),
    Case("PDRequestsFail", {status(502): grows(20)}),
    Case("PDTurnsTriedAgain", {RETRIES: grows(60)}),
    Case("PDQueueFull", {status(429): grows(20)}),
    Case("PDNothingPulled", {PULLED: flat(7), CACHED: grows(100_000)}),
    Case(
        "PDEngineNeverPulls", {pulls("qwen-prefill-1", "pulled"): flat(3), pulls("qwen-prefill-1", "failed"): grows(40)}
    ),
    Case("PDDecodeMemoryPinned", {USAGE: flat(0.97)}),
    Case("PDHandleStoreDown", {router("handle_store_up"): flat(0)}),
    # Open for a while, then a trial that fails: a scrape sees it open now and then.
    Case("PDBreakerOpen", {breaker("open"): "1 0 0 " * (MINUTES // 3), breaker("closed"): flat(0)}),
    Case("PDPairQuarantined", {QUARANTINE: "1 1 1 1 1 0.5 0.5 " * (MINUTES // 7)}),
    Case("PDEngineStuck", {LEGS: f"{grows(600, 30)} {flat(18000, MINUTES)}"}),
    Case("PDEnginesRestart", {RESTARTS: grows(0.1)}),
    Case("PDRouterWorkersEnd", {router("worker_restarts_total"): grows(0.1)}),
    Case("PDFilesStale", {router("stale_files"): flat(1)}),
]

DAY: Final = 12 * 26
"""Samples, one in five minutes, before something changes."""


def changes(before: float, after: float) -> str:
    return f"{grows(before, DAY)} {before * DAY:g}+{after:g}x{12 * 4}"


LONG_WELL: Final = {name: text.replace(f"x{MINUTES}", f"x{12 * 30}") for name, text in WELL.items()}
AGAINST_YESTERDAY: Final = [
    Case("PDReuseCollapsed", {PULLED: changes(600_000, 20_000)}, base=LONG_WELL, interval="5m", at=(29 * 60,)),
    Case(
        "PDTimeToFirstTokenDoubled",
        {ttft("0.5"): changes(570, 100), ttft("1"): changes(597, 300)},
        base=LONG_WELL,
        interval="5m",
        at=(29 * 60,),
    ),
]

QUIET: Final = [
    Case("all is well", {}),
    Case("all is well for a day", {}, base=LONG_WELL, interval="5m", at=(60 * 5, 60 * 29)),
    Case("nobody asks anything", {name: flat(100) for name in WELL if counts(name)} | {TURNS: flat(0)}),
    Case("no engine for a moment", {ready("decode"): dip(2, 0)}, at=(92, 110)),
    Case("the API server is away for a moment", {router("discovery_connected"): dip(1, 0)}, at=(92, 110)),
    Case("the store restarts", {router("handle_store_up"): dip(1, 0)}, at=(92, 110)),
    Case("a breaker opens once", {breaker("open"): dip(0, 1, minutes=1)}, at=(91, 95, 110)),
    Case("an engine restarts", {RESTARTS: f"{flat(1, 90)} {flat(2, 30)}"}),
    Case("decode is full of running turns", {USAGE: flat(0.97), PINNED: flat(0)}),
    Case("no reuse is asked for", {stage("attached"): flat(0), PULLED: flat(0)}),
    Case("prefill has it all in its own cache", {PULLED: flat(7), CACHED: grows(900_000)}),
    Case("an engine that is sent no handles", {pulls("qwen-prefill-1", one): flat(3) for one in ("pulled", "failed")}),
    Case("an idle engine", {TURNS: flat(0), LEGS: flat(9)}),
    Case("nothing deployed", {**NO_ROUTER, operator("deployments"): flat(0)}),
    Case("a night without turns", {name: changes(600, 0) for name in WELL if counts(name)} | {TURNS: flat(0, DAY + 48)},
         base=LONG_WELL, interval="5m", at=(29 * 60,)),
]  # fmt: skip


def as_test(case: Case) -> dict[str, Any]:
    """The case in promtool's words."""
    series = {name: text for name, text in {**case.base, **case.series}.items() if text}
    fires = case.fires or ((case.name,) if case.name.startswith("PD") else ())
    firing = [{"labels": json_labels(alert), "value": 1} for alert in fires]
    return {
        "name": case.name,
        "interval": case.interval,
        "input_series": [{"series": name, "values": text} for name, text in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (count by (alertname) (ALERTS{alertstate="firing"}))',
                "eval_time": f"{minute}m",
                "exp_samples": firing,
            }
            for minute in case.at
        ],
    }


def json_labels(alert: str) -> str:
    return f'{{alertname="{alert}"}}'


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules of the rendered object, in a file."""
    folder = tmp_path_factory.mktemp("rules")
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(only(render(RULES), "PrometheusRule")["spec"]), encoding="utf-8")
    return path


def alerts(rules: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
    ]
    return found


def test_prometheus_accepts_the_rules(rules: Path) -> None:
    code, said = promtool.run("check", "rules", str(rules))
    assert code == 0, said
    assert f"{len(alerts(rules))} rules found" in said


def test_every_alert_has_a_case(rules: Path) -> None:
    names = [rule["alert"] for rule in alerts(rules)]
    assert sorted(case.name for case in (*FIRING, *AGAINST_YESTERDAY)) == sorted(names)


@pytest.mark.parametrize("cases", [FIRING, AGAINST_YESTERDAY, QUIET], ids=["firing", "against yesterday", "quiet"])
def test_alerts(rules: Path, tmp_path: Path, cases: list[Case]) -> None:
    tests = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m" if cases is not AGAINST_YESTERDAY else "5m",
        "tests": [as_test(case) for case in cases],
    }
    path = tmp_path / "tests.json"
    path.write_text(json.dumps(tests), encoding="utf-8")
    code, said = promtool.run("test", "rules", str(path))
    assert code == 0, said


def test_a_wrong_expectation_is_found(rules: Path, tmp_path: Path) -> None:
    test = as_test(Case("PDBreakerOpen", {}))
    path = tmp_path / "tests.json"
    path.write_text(json.dumps({"rule_files": [str(rules)], "tests": [test]}), encoding="utf-8")
    code, said = promtool.run("test", "rules", str(path))
    assert code != 0
    assert "PDBreakerOpen" in said


def test_the_runbook_has_a_section_for_each(rules: Path) -> None:
    text = (CHART.parents[1] / "docs" / "runbook.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [rule["alert"] for rule in alerts(rules)], "in the order of the file"
    for rule in alerts(rules):
        words = sections[rule["alert"]]
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in words, rule["alert"]
        for metric in re.findall(r"pd_\w+(?=_total|\b)", words):
            assert re.search(rf"^\| `{metric}\w*` ", PAGE, re.MULTILINE), metric


def test_alerts_name_their_section_of_your_runbook() -> None:
    page = "https://wiki.example/pd/runbook"
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookURL": page}}}
    found = [rule for group in only(render(values), "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    for rule in found:
        assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"


@pytest.mark.parametrize("url", ["wiki", "https://wiki.example/a#b", "https://wiki.example/ a"])
def test_a_runbook_that_is_no_page_is_refused(url: str) -> None:
    with pytest.raises(HelmError, match="runbookURL"):
        render({"metrics": {"prometheusRule": {"enabled": True, "runbookURL": url}}})
