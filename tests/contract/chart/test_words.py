"""What the documents say about the chart is so: values, reasons and files that they name exist."""

from __future__ import annotations

import re

import pytest
import yaml

from pd_operator.core.reasons import Reason
from support.charts import CHART

ROOT = CHART.parents[1]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
DOCUMENTS = ["README.md", "docs/install.md", "images/README.md", "charts/pd-operator/README.md"]


def has(path: str) -> bool:
    """Is there such a value, or one above it that holds anything?"""
    here = VALUES
    for key in path.split("."):
        if not isinstance(here, dict):
            return False
        if key not in here:
            return here == {}
        here = here[key]
    return True


def named_values(text: str) -> set[str]:
    """Values in code: after `--set`, and words like `crds.keep` whose first part is one of the chart's."""
    words = set(re.findall(r"--set[ =]\"?([A-Za-z][\w.]*)=", text))
    for code in re.findall(r"`([^`\n]+)`", text):
        word = re.match(r"([A-Za-z]+(?:\.[A-Za-z]+)+)(?:=|$)", code)
        if word and word[1].partition(".")[0] in VALUES:
            words.add(word[1])
    return words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_values_that_are_named_exist(document: str) -> None:
    named = named_values((ROOT / document).read_text(encoding="utf-8"))
    assert named
    assert {word for word in named if not has(word)} == set()


def test_a_wrong_name_would_be_found() -> None:
    assert named_values("x `crds.keeep=false` y `--set image.tagg=1`") == {"crds.keeep", "image.tagg"}
    assert not has("crds.keeep")
    assert has("commonLabels.anything")


def test_reasons_in_the_table_of_troubles_exist() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## When something is wrong")[2]
    named = set(re.findall(r"^\| `([A-Z]\w+)` \|", text, flags=re.MULTILINE))
    assert named
    assert named <= {str(reason.value) for reason in Reason}


@pytest.mark.parametrize("document", DOCUMENTS[1:])
def test_files_that_are_linked_exist(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_no_address_of_this_machine_or_a_registry_stands_in_what_is_shipped() -> None:
    for folder in (CHART, ROOT / "images"):
        for path in folder.rglob("*"):
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                assert not re.search(r"/work/|/root/|/tmp/pytest", text), path
