"""Each value is described, checked, and does something."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from support.charts import CHART, HelmError, combined, helm, render

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
SCRIPT = runpy.run_path(str(CHART / "scripts" / "values_table.py"))
OPEN = {"global", "affinity", "resources.requests", "resources.limits", "operator.extraEnv[].valueFrom"}
"""Where Kubernetes itself, or the chart around this one, says what may stand there."""


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of everything in values.yaml that is no object of the chart's own."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below the root with its path; shared ones where they are used."""
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


def test_every_value_is_described() -> None:
    described = {path for path, _ in SCRIPT["documented"]((CHART / "values.yaml").read_text(encoding="utf-8"))}
    for leaf in leaves(VALUES):
        assert any(leaf[:depth] in described for depth in range(1, len(leaf) + 1)), ".".join(leaf)


def test_the_readmes_table_is_what_the_values_say() -> None:
    assert SCRIPT["main"](["--check"]) == 0, "run `make chart`"


def test_the_table_has_the_defaults_and_all_of_a_long_description() -> None:
    text = "a:\n  # -- First line,\n  # and second | line.\n  b: [1]\n# no description\nc: 2\n"
    assert SCRIPT["table"](text).splitlines()[2:] == [r"| `a.b` | `[1]` | First line, and second \| line. |"]


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_the_schema_knows_every_value_and_no_other() -> None:
    known = {path for path, node in nodes(SCHEMA) if "properties" not in node and "[]" not in path}
    wanted = {".".join(path) for path in leaves(VALUES)}
    inside = {path for path in wanted if any(path.startswith(f"{parent}.") for parent in known)}
    assert wanted - inside <= known
    maps_with_a_default = {"resources.requests", "resources.limits", "metrics.dashboards.labels"}
    assert known - wanted == {"global", "resources.claims"} | maps_with_a_default


def test_no_object_takes_unknown_keys() -> None:
    for path, node in nodes(SCHEMA):
        closed = node.get("additionalProperties") is False or isinstance(node.get("additionalProperties"), dict)
        if node.get("type") == "object" and not closed:
            assert path in OPEN or re.fullmatch(
                r"(tolerations|resources\.claims|networkPolicy\.metricsFrom)\[\].*", path
            )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 2}, "replicas"),
        ({"image": {"tagg": "x"}}, "tagg"),
        ({"image": {"registry": "Has.Capitals"}}, "/image/registry"),
        ({"image": {"registry": "https://r.example.com"}}, "/image/registry"),
        ({"image": {"repository": ""}}, "/image/repository"),
        ({"image": {"digest": "sha256:abc"}}, "/image/digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
        ({"imagePullSecrets": ["name"]}, "/imagePullSecrets/0"),
        ({"children": {"imagePullSecrets": ["a,b"]}}, "/children/imagePullSecrets/0"),
        ({"watch": {"scope": "Namespaces"}}, "/watch/namespaces"),
        ({"watch": {"namespaces": ["a"]}}, "/watch/namespaces"),
        ({"watch": {"scope": "Namespaces", "namespaces": ["a", "a"]}}, "/watch/namespaces"),
        ({"watch": {"scope": "Namespaces", "namespaces": ["A_b"]}}, "/watch/namespaces/0"),
        ({"operator": {"resyncSeconds": 0}}, "/operator/resyncSeconds"),
        ({"operator": {"workers": "8"}}, "/operator/workers"),
        ({"operator": {"logFormat": "xml"}}, "/operator/logFormat"),
        ({"operator": {"extraEnv": [{"name": "PD_ROUTER_IMAGE", "value": "x"}]}}, "/operator/extraEnv/0"),
        ({"resources": {"limit": {}}}, "limit"),
        ({"commonLabels": {"a": 1}}, "/commonLabels/a"),
        ({"podAnnotations": {"a": True}}, "/podAnnotations/a"),
        ({"metrics": {"podMonitor": {"interval": "often"}}}, "/metrics/podMonitor/interval"),
        ({"networkPolicy": {"apiServer": {"ports": []}}}, "/networkPolicy/apiServer/ports"),
        ({"networkPolicy": {"apiServer": {"cidrs": ["10.0.0.1"]}}}, "/networkPolicy/apiServer/cidrs/0"),
        *(
            ({"networkPolicy": {"apiServer": {"cidrs": [cidr]}}}, "/networkPolicy/apiServer/cidrs/0")
            for cidr in ("10.0.0.0/99", "10.0.0.256/8", "fd00::/129")
        ),
        ({"networkPolicy": {"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/99"}}]}}, "metricsFrom/0/ipBlock/cidr"),
        ({"networkPolicy": {"metricsFrom": [{"ipBlock": {}}]}}, "metricsFrom/0/ipBlock"),
        ({"commonLabels": {"a": "b c"}}, "/commonLabels/a"),
        ({"commonLabels": {"a": "b" * 64}}, "/commonLabels/a"),
        ({"podLabels": {"a b": "c"}}, "/podLabels"),
        ({"podLabels": {"a": "-b"}}, "/podLabels/a"),
        ({"nodeSelector": {"a": "b/c"}}, "/nodeSelector/a"),
        ({"podAnnotations": {"a/b/c": "d"}}, "/podAnnotations"),
        ({"metrics": {"podMonitor": {"labels": {"a": "b c"}}}}, "/metrics/podMonitor/labels/a"),
        ({"networkPolicy": {"metricsFrom": [{}]}}, "/networkPolicy/metricsFrom/0"),
        ({"fullnameOverride": "UPPER"}, "/fullnameOverride"),
        ({"fullnameOverride": "a" * 53}, "/fullnameOverride"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match="don't meet the specifications of the schema") as refused:
        render(values)
    assert named in str(refused.value)


@pytest.mark.parametrize("path", ["operator", "watch", "crds", "rbac", "metrics", "operator.workers"])
def test_what_is_taken_out_by_null_is_asked_for_by_name(path: str) -> None:
    with pytest.raises(HelmError, match=rf"missing property '{path.rpartition('.')[2]}'"):
        render(nested(tuple(path.split(".")), None))


def test_any_other_value_may_be_null() -> None:
    """Helm takes a key out then: the templates do without it, or the schema says that they cannot."""
    paths = {leaf[:depth] for leaf in leaves(VALUES) for depth in range(1, len(leaf) + 1)}
    faults = {".".join(path): fault for path in sorted(paths) if (fault := fault_without(path))}
    assert faults == {}


def fault_without(path: tuple[str, ...]) -> str:
    """What is wrong with the chart's answer to a value that is null; empty: nothing."""
    try:
        found = json.dumps(render(combined(switched_on(path), nested(path, None))))
    except HelmError as refused:
        said = str(refused)
        return "" if "don't meet the specifications of the schema" in said or "is required" in said else said
    return next(iter(re.findall(r'<nil>|"--[a-z-]+="', found)), "")


def test_without_a_registry_nothing_is_installed() -> None:
    with pytest.raises(HelmError, match=r"image\.registry is required.*images/README\.md"):
        render({"image": {"registry": ""}})


def test_a_service_monitor_needs_the_service() -> None:
    with pytest.raises(HelmError, match=r"needs metrics\.service\.enabled"):
        render({"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}})


CHANGES: dict[str, Any] = {
    "fullnameOverride": "other", "commonLabels": {"a": "b"}, "image.repository": "x", "image.tag": "x",
    "image.digest": f"sha256:{'1' * 64}", "image.pullPolicy": "Always", "routerImage.registry": "x",
    "routerImage.repository": "x", "routerImage.tag": "x", "routerImage.digest": f"sha256:{'1' * 64}",
    "connectorImage.registry": "x", "connectorImage.repository": "x", "connectorImage.tag": "x",
    "connectorImage.digest": f"sha256:{'1' * 64}", "image.registry": "x", "imagePullSecrets": [{"name": "x"}],
    "children.imagePullPolicy": "Never", "children.imagePullSecrets": ["x"], "operator.resyncSeconds": 7,
    "operator.routerPollSeconds": 7, "operator.workers": 7, "operator.requestTimeoutSeconds": 7,
    "operator.logFormat": "plain", "operator.verbose": True, "operator.extraEnv": [{"name": "A", "value": "b"}],
    "serviceAccount.create": False, "serviceAccount.name": "x", "serviceAccount.annotations": {"a": "b"},
    "rbac.create": False, "rbac.userRoles": False, "crds.install": False, "crds.keep": False,
    "resources.requests.cpu": "1", "resources.requests.memory": "1Gi", "resources.limits.memory": "2Gi",
    "nodeSelector": {"a": "b"}, "tolerations": [{"operator": "Exists"}], "affinity": {"podAffinity": {}},
    "priorityClassName": "x", "podAnnotations": {"a": "b"}, "podLabels": {"a": "b"},
    "metrics.service.enabled": False, "metrics.service.annotations": {"a": "b"},
    "metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True,
    "metrics.prometheusRule.enabled": True, "metrics.dashboards.enabled": True, "networkPolicy.enabled": True,
    "tests.enabled": False,
    # These say something only beside others.
    "watch.scope": None, "watch.namespaces": None, "metrics.serviceMonitor.interval": "1m",
    "metrics.serviceMonitor.labels": {"a": "b"}, "metrics.podMonitor.interval": "1m",
    "metrics.podMonitor.labels": {"a": "b"}, "metrics.prometheusRule.labels": {"a": "b"},
    "metrics.prometheusRule.runbookURL": "https://wiki.example/runbook",
    "metrics.dashboards.labels": {"a": "b"}, "metrics.dashboards.labels.grafana_dashboard": "2",
    "metrics.dashboards.annotations": {"a": "b"},
    "networkPolicy.metricsFrom": [{"podSelector": {}}], "networkPolicy.apiServer.cidrs": ["10.0.0.0/8"],
    "networkPolicy.apiServer.ports": [443],
}  # fmt: skip


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    return {path[0]: nested(path[1:], value) if len(path) > 1 else value}


def switched_on(path: tuple[str, ...]) -> dict[str, Any]:
    """The value set in which the value at a path has something to say."""
    if path[0] == "metrics" and len(path) > 2 and path[1] != "service" and path[-1] != "enabled":
        return nested((*path[:2], "enabled"), True)
    return nested(("networkPolicy", "enabled"), True) if path[0] == "networkPolicy" and path[1:] != ("enabled",) else {}


@pytest.mark.parametrize("path", [path for path in leaves(VALUES) if path[0] != "watch"], ids=".".join)
def test_every_value_changes_something(path: tuple[str, ...]) -> None:
    base = switched_on(path)
    assert render(combined(base, nested(path, CHANGES[".".join(path)]))) != render(base)


def test_labels_of_users_never_win_over_the_charts() -> None:
    ours = {"app.kubernetes.io/name": "x", "app.kubernetes.io/component": "x", "app.kubernetes.io/instance": "x"}
    theirs = {
        "commonLabels": ours,
        "podLabels": ours,
        "podAnnotations": {"kubectl.kubernetes.io/default-container": "x"},
    }
    [mine] = [one for one in render(theirs) if one["kind"] == "Deployment"]
    [plain] = [one for one in render() if one["kind"] == "Deployment"]
    assert mine == plain


def test_a_long_release_name_still_gives_valid_names() -> None:
    text = helm(
        *("template", "r" * 53, str(CHART), "--kube-version", "1.37.2", "--set", "image.registry=x"),
        *("--set", "metrics.dashboards.enabled=true"),
    )
    names = [one["metadata"]["name"] for one in yaml.safe_load_all(text) if one]
    assert max(len(name) for name in names) <= 63
