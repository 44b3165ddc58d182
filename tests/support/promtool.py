"""Prometheus' own tool: its parser for rules, queries and metric names, and its evaluator for alerts.

`python -m support.promtool` puts it into the cache, unless it is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

from support.debian import unpacked


@cache
def promtool() -> str:
    """The program. Raises NotThere."""
    return shutil.which("promtool") or str(unpacked(("prometheus",), "prometheus") / "usr" / "bin" / "promtool")


def run(*words: str, text: str | None = None, folder: Path | None = None) -> tuple[int, str]:
    """Exit status, and all that it says."""
    done = subprocess.run([promtool(), *words], input=text, capture_output=True, text=True, cwd=folder, check=False)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    print(promtool())
