"""What the README tells to type works in a new clone: the programs are where it says, and the model is made first."""

from __future__ import annotations

import re
from pathlib import Path

from pdctl.core.cluster.images import OPERATOR_IMAGE
from pdctl.shell.files import load_deployment

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLUSTER_PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"^```\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
PROGRAMS = ("pdctl", "pd-router", "pd-operator")


def test_our_programs_are_called_where_make_puts_them() -> None:
    called = [line.split()[0] for line in LINES if line and line.split()[0].rpartition("/")[2] in PROGRAMS]
    assert ".venv/bin/pd-router" in called
    assert {word.rpartition("/")[0] for word in called} == {".venv/bin"}


def test_the_model_of_an_example_is_made_before_the_example_runs() -> None:
    made: set[Path] = set()
    ran = 0
    for line in LINES:
        if found := re.match(r"\S+/pdctl model make (\S+)", line):
            made.add((ROOT / found[1]).resolve())
        if found := re.match(r"\S+/pdctl up -f (\S+)", line):
            ran += 1
            assert Path(load_deployment(ROOT / found[1]).spec.model.name) in made
    assert ran


def test_the_way_from_an_empty_cluster_to_an_answer_names_what_there_is() -> None:
    [way] = re.findall(r"^## From nothing to an answer$.*?^```\n(.*?)^```", CLUSTER_PAGE, re.M | re.S)
    registry, tag = OPERATOR_IMAGE.partition("/")[0], OPERATOR_IMAGE.rpartition(":")[2]
    assert f"--set image.registry={registry} --set image.tag={tag}" in way
    [example] = re.findall(r"apply -n llm -f (\S+)", way)
    deployment = load_deployment(ROOT / example)
    # As the URL of the object's status, whose port clients need not name.
    assert deployment.spec.router.service.port == 80
    assert f"http://{deployment.metadata.name}-router.llm.svc/v1/" in way
    assert f'"model": "{deployment.spec.model.public_name}"' in way
    assert f"pdd/{deployment.metadata.name} " in way
    steps = re.findall(r"pdctl (model make|cluster \w+)", way)
    assert steps[:3] == ["model make", "cluster up", "cluster helm"]
    assert steps[-2:] == ["cluster exec", "cluster down"]
