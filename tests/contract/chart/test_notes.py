"""What helm prints after an installation: how to remove what the release brought, and nothing of anybody else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.charts import CHART, only, render

SCOPED: dict[str, Any] = {"watch": {"scope": "Namespaces", "namespaces": ["team-a", "team-b"]}}
GUIDE = CHART.parents[1] / "docs" / "install.md"


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with its notes in an object besides: helm shows notes only where it finds a cluster."""
    made = tmp_path_factory.mktemp("notes") / "pd-operator"
    shutil.copytree(CHART, made)
    templates = made / "templates"
    text = (templates / "NOTES.txt").read_text(encoding="utf-8")
    (templates / "notes.yaml").write_text(
        f'{{{{- define "notes" }}}}{text}{{{{- end }}}}\n'
        'apiVersion: v1\nkind: Notes\nmetadata: {name: notes}\ntext: {{ include "notes" . | toJson }}\n',
        encoding="utf-8",
    )
    return made


def notes(chart: Path, *sets: dict[str, Any]) -> str:
    """The text for these values."""
    return str(only(render(*sets, chart=chart), "Notes")["text"])


def commands(text: str) -> list[str]:
    """What it says to run for removal, in order."""
    return [line.strip() for line in text.partition("To remove")[2].splitlines() if line.startswith("  ")]


def guarded(text: str) -> str:
    """The line that deletes the definition."""
    [line] = [line.strip() for line in text.splitlines() if "delete crd" in line]
    return line


def test_a_release_of_the_cluster_is_removed_with_every_deployment(chart: Path) -> None:
    text = notes(chart)
    assert commands(text) == ["kubectl delete pdd -A --all", "helm -n pd-system uninstall pd-operator", guarded(text)]


@pytest.mark.parametrize("namespaces", [["team-a"], ["team-a", "team-b"]], ids=["one", "two"])
def test_a_release_of_some_namespaces_takes_nothing_of_others(chart: Path, namespaces: list[str]) -> None:
    text = notes(chart, SCOPED, {"watch": {"namespaces": namespaces}})
    expected = [f"kubectl -n {name} delete pdd --all" for name in namespaces]
    assert commands(text) == [*expected, "helm -n pd-system uninstall pd-operator", guarded(text)]
    assert not re.search(r"delete pdd.*(-A|--all-namespaces)", text)


@pytest.mark.parametrize("sets", [{}, SCOPED], ids=["cluster", "namespaces"])
def test_a_definition_that_goes_with_the_release_is_warned_of_and_one_of_somebody_else_left_alone(
    chart: Path, sets: dict[str, Any]
) -> None:
    gone = notes(chart, sets, {"crds": {"keep": False}})
    assert "every PDDeployment of the cluster" in gone.partition("CAREFUL")[2]
    for text in (gone, notes(chart, sets, {"crds": {"install": False}})):
        assert "delete crd" not in text


@pytest.mark.parametrize("sets", [{}, SCOPED], ids=["cluster", "namespaces"])
@pytest.mark.parametrize(
    ("pdds", "deployments", "deleted"),
    [
        ("true", "true", True),
        ("echo pddeployment.pdserving.dev/theirs", "true", False),
        ("true", "echo deployment.apps/their-operator", False),
        ("false", "true", False),
        ("true", "false", False),
    ],
    ids=["nobody", "their deployments", "their operator", "deployments not known", "operators not known"],
)
def test_the_definition_is_deleted_only_where_nobody_is_known_to_need_it(
    chart: Path, tmp_path: Path, sets: dict[str, Any], pdds: str, deployments: str, deleted: bool
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\ncase "$1 $2" in "get pdd") {pdds} ;; "get deployment") {deployments} ;; '
        f'"delete crd") echo "$3" > {tmp_path}/deleted ;; *) exit 2 ;; esac\n',
        encoding="utf-8",
    )
    kubectl.chmod(0o755)
    line = guarded(notes(chart, sets))
    done = subprocess.run(
        ["/bin/sh", "-c", line], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert (tmp_path / "deleted").exists() is deleted
    assert ("kept" in done.stdout) is not deleted


def test_the_guide_says_the_same(chart: Path) -> None:
    removal = GUIDE.read_text(encoding="utf-8").partition("## 6. Remove")[2].partition("\n## ")[0]
    assert guarded(removal) == guarded(notes(chart))
    assert "kubectl -n TEAM delete pdd --all" in removal


def test_operators_are_found_by_the_labels_that_the_line_asks_for(chart: Path) -> None:
    found = re.search(r"-l (\S+)", guarded(notes(chart)))
    assert found
    labels = only(render(SCOPED), "Deployment")["metadata"]["labels"]
    assert dict(pair.split("=") for pair in found[1].split(",")).items() <= labels.items()
