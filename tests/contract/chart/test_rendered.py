"""What helm makes of the chart is valid for every Kubernetes version that the chart admits, whatever the values."""

from __future__ import annotations

import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from pd_operator.core.crd import custom_resource_definition
from support.charts import CHART, REGISTRY, HelmError, helm, only, render

ROOT = CHART.parents[1]
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
MONITORING = "monitoring.coreos.com/v1"

EVERYTHING: dict[str, Any] = {
    "commonLabels": {"team": "serving"},
    "image": {"digest": f"sha256:{'0' * 64}", "pullPolicy": "Always"},
    "routerImage": {"registry": "other.example.com", "tag": "next"},
    "imagePullSecrets": [{"name": "pull"}],
    "children": {"imagePullPolicy": "Never", "imagePullSecrets": ["a", "b"]},
    "operator": {"verbose": True, "logFormat": "plain", "extraEnv": [{"name": "TZ", "value": "UTC"}]},
    "serviceAccount": {"name": "chosen", "annotations": {"a": "b"}},
    "resources": {"limits": {"cpu": 2}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "metrics": {
        "service": {"annotations": {"a": "b"}},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prom"}},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True, "annotations": {"folder": "LLM"}},
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "apiServer": {"cidrs": ["10.0.0.0/16", "fd00::/8"], "ports": [443]},
    },
}
NOTHING: dict[str, Any] = {
    "fullnameOverride": "op",
    "serviceAccount": {"create": False},
    "rbac": {"create": False, "userRoles": False},
    "crds": {"install": False},
    "metrics": {"service": {"enabled": False}},
    "tests": {"enabled": False},
}
TEAMS: dict[str, Any] = {"watch": {"scope": "Namespaces", "namespaces": ["team-a", "team-b"]}}
SETS: dict[str, tuple[dict[str, Any], ...]] = {
    "defaults": (),
    "everything": (EVERYTHING,),
    "nothing": (NOTHING,),
    "namespaces": (TEAMS,),
    "namespaces and everything": (TEAMS, EVERYTHING),
    "policy without addresses": ({"networkPolicy": {"enabled": True}},),
    "definition goes with the release": ({"crds": {"keep": False}},),
}


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS.keys())
def test_objects_are_valid(sets: tuple[dict[str, Any], ...]) -> None:
    objects = [one for one in render(*sets) if one["apiVersion"] != MONITORING]
    assert objects
    for one in objects:
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_no_object_depends_on_the_servers_version(version: str) -> None:
    """So that checking one rendering against every version is enough."""
    assert render(EVERYTHING, version=f"{version}.0") == render(EVERYTHING)


def test_the_validator_finds_faults() -> None:
    deployment = only(render(), "Deployment")
    deployment["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


@pytest.mark.parametrize("version", ["1.29.9", "1.20.0"])
def test_older_servers_are_refused(version: str) -> None:
    with pytest.raises(HelmError, match=r"requires kubeVersion: >=1\.30"):
        render(version=version)


def test_versions_of_eks_are_admitted() -> None:
    assert render(version="1.34.1-eks-5677a1b")


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS.keys())
def test_lint_has_nothing_to_say(sets: tuple[dict[str, Any], ...]) -> None:
    values: dict[str, Any] = {}
    for one in (REGISTRY, *sets):
        values = {**values, **one}
    report = helm("lint", "--strict", str(CHART), "--kube-version", f"{VERSIONS[-1]}.0", values=values)
    assert "1 chart(s) linted, 0 chart(s) failed" in report


def test_lint_is_content_with_the_chart_as_it_is() -> None:
    """Without a value, as people and catalogues run it."""
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", str(CHART))


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS.keys())
def test_every_object_is_labelled_and_placed(sets: tuple[dict[str, Any], ...]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for one in render(*sets):
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "pd-operator"
        assert labels["app.kubernetes.io/instance"] == "pd-operator"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        of_cluster = one["kind"] in ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
        assert ("namespace" in one["metadata"]) != of_cluster, "a renderer without helm's help must know where it goes"
        key = (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
        assert key not in seen
        seen.add(key)


def test_nothing_but_the_operator_when_all_is_off() -> None:
    assert [one["kind"] for one in render(NOTHING)] == ["Deployment"]


def test_everything_is_there_when_all_is_on() -> None:
    kinds = sorted(one["kind"] for one in render(EVERYTHING))
    assert kinds == [
        "ClusterRole", "ClusterRole", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "CustomResourceDefinition",
        "Deployment", "NetworkPolicy", "Pod", "PodMonitor", "PodMonitor", "PrometheusRule", "Service",
        "ServiceAccount", "ServiceMonitor",
    ]  # fmt: skip


# --- the definition ---------------------------------------------------------------------------------------------------


def test_the_charts_copy_of_the_definition_is_the_definition() -> None:
    copy = CHART / "files" / "pddeployments.yaml"
    assert copy.read_bytes() == (ROOT / "crds" / "pddeployments.yaml").read_bytes(), "run `make chart`"


@pytest.mark.parametrize("keep", [True, False])
def test_the_rendered_definition_is_the_models(keep: bool) -> None:
    found = only(render({"crds": {"keep": keep}, "commonLabels": {"a": "b"}}), "CustomResourceDefinition")
    metadata = found.pop("metadata")
    expected = custom_resource_definition()
    assert metadata["name"] == expected.pop("metadata")["name"]
    assert metadata.get("annotations", {}) == ({"helm.sh/resource-policy": "keep"} if keep else {})
    assert found == expected


def test_a_foreign_definition_is_noticed(tmp_path: Path) -> None:
    chart = tmp_path / "pd-operator"
    shutil.copytree(CHART, chart)
    (chart / "files" / "pddeployments.yaml").write_text("metadata:\n  name: other\n", encoding="utf-8")
    with pytest.raises(HelmError, match="is not the definition of PDDeployment"):
        render(chart=chart)


# --- the chart as a whole ---------------------------------------------------------------------------------------------


def test_the_chart_has_the_projects_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == project["version"]


def test_a_package_holds_what_helm_needs_and_no_more(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("pd-operator/") for name in tar.getnames()}
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "README.md", "files/pddeployments.yaml"} <= names
    assert not any(name.startswith("scripts") for name in names)
    # A release is kept in a Secret, which holds at most 1 MiB.
    assert archive.stat().st_size < 200_000


def test_no_object_of_users_is_part_of_the_release() -> None:
    assert not any(one["kind"] == "PDDeployment" for one in render(EVERYTHING))


def test_texts_that_look_like_numbers_stay_texts() -> None:
    """As with `--set-string`: an API server takes no number for a text."""
    numbers = {
        "priorityClassName": "5",
        "serviceAccount": {"name": "7"},
        "watch": {"scope": "Namespaces", "namespaces": ["1", "0x2"]},
        "networkPolicy": {"enabled": True},
    }
    found = render(EVERYTHING, numbers, namespace="8", release="9")
    for one in found:
        texts = [one["metadata"]["name"], one["metadata"].get("namespace", ""), *one["metadata"]["labels"].values()]
        assert all(isinstance(text, str) for text in texts), one["metadata"]
        if one["apiVersion"] != MONITORING:
            kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
    pod = only(found, "Deployment")["spec"]["template"]["spec"]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("5", "7")
    assert {"--namespace=1", "--namespace=0x2"} <= set(pod["containers"][0]["args"])


def test_helm_takes_a_cluster_for_one_of_today() -> None:
    """Without being told which version to render for."""
    assert "kind: Deployment" in helm("template", "x", str(CHART), values=REGISTRY)
