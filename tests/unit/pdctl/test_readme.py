"""What the README tells to type works in a new clone: the programs are where it says, and the model is made first."""

from __future__ import annotations

import re
from pathlib import Path

from pdctl.shell.files import load_deployment

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
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
