"""Write the table of values in the chart's README from the comments in values.yaml: `python values_table.py`.

A comment that begins with `# --` describes the key below it, and with it everything inside that key. With `--check`
nothing is written, and the exit status is 1 when the table is not what it should be.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[1]
README = CHART / "README.md"
BEGIN = "<!-- values: written by scripts/values_table.py -->"
END = "<!-- end of values -->"
KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):")


def documented(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and description of each key that has one, in the order of the file."""
    path: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("# -- "):
            words = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("# ") and words:
            words.append(stripped.removeprefix("# "))
        elif match := KEY.match(line):
            path[len(match["indent"]) // 2 :] = [match["key"]]
            if words:
                yield tuple(path), " ".join(words)
            words = []
        else:
            words = []


def table(text: str) -> str:
    """The table as Markdown."""
    values = yaml.safe_load(text)
    rows = ["| value | default | what it is |", "| --- | --- | --- |"]
    for path, description in documented(text):
        default: Any = values
        for key in path:
            default = default[key]
        rows.append(f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {description.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def updated(readme: str, text: str) -> str:
    """The README with the table between its two marks.

    Raises:
        ValueError: the marks are missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} has no place for the table")
    return f"{before}{BEGIN}\n{table(text)}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write, or only compare."""
    readme = README.read_text(encoding="utf-8")
    wanted = updated(readme, (CHART / "values.yaml").read_text(encoding="utf-8"))
    if arguments == ["--check"]:
        return int(wanted != readme)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
