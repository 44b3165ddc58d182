"""`python -m pd_connector.selftest`: run in the engine's container before the engine starts.

Ends with 0 when everything that the plugin relies on is there and its guards hold on the installed vLLM, and with 1 and
the reasons otherwise. Takes as long as importing vLLM does, needs no model and no device unless ``--backend`` asks for
one. What it found is written to the file that ``PD_SELF_TEST_REPORT`` names: in a pod, where the operator reads it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pd_connector import compat
from pd_connector.core.verdicts import Check, lines
from pd_connector.shell import checks
from pd_wire import names


def run(backends: Sequence[str], transfer_config: str | None) -> Iterator[Check]:
    """The checks in order; those that need a supported vLLM are left out without one."""
    vllm = checks.check_vllm()
    yield vllm
    yield checks.check_nixl()
    if vllm.fault is None:
        hooks = checks.check_hooks()
        yield hooks
        yield checks.check_stream(compat.require_supported(compat.installed_version()))
        if hooks.fault is None:
            from pd_connector.shell.bench import try_guards

            yield from try_guards()
        if transfer_config is not None:
            yield checks.check_configuration(transfer_config)
    for backend in backends:
        yield checks.check_backend(backend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per check; 0 when all passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m pd_connector.selftest", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", default=[], help="NIXL backend that must be creatable, e.g. UCX")
    parser.add_argument("--kv-transfer-config", help="the engine's value: refuse what the engine would refuse")
    options = parser.parse_args(arguments)
    done = list(run(options.backend, options.kv_transfer_config))
    print("\n".join(lines(done)))
    if any(check.fault for check in done):
        return 1
    report = os.environ.get(names.SELF_TEST_REPORT)
    if report:
        Path(report).write_text(json.dumps(checks.found_versions()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
