"""Many PDDeployments on one operator: ``python tests/perf/many_deployments.py [--count 300]``.

A light embedded cluster, one operator for all namespaces, PDDeployments spread over ten namespaces, a few of them bad.
Measured: seconds until every object has its children and a judged status, memory at its peak, API calls, the longest
time that one further object waits while all others are there, writes of two complete looks (must be none).

Times depend on what else the machine does; writes and memory do not. Exit status 1 when something is written without a
change, when memory exceeds the chart's limit, or when a bad object held up others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from pd_operator.core.observed_kinds import CHILD_KINDS, DEPLOYMENTS
from pdctl.core.cluster.audit import AuditEvent
from pdctl.shell.cluster.api import APPLY
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.start import Wishes
from support.clusters import cluster_for_tests, eventually, exists, make_namespace, remove_abandoned
from support.operator_lab import AGENTS
from support.operator_process import ROOT, OperatorProcess
from support.pddeployments import edited, smallest

NAMESPACES: Final = 10
BAD_EACH: Final = 50
"""One object in so many has a spec that the operator refuses."""

MEMORY_LIMIT_MIB: Final = 256
PATIENCE_S: Final = 3600.0


@dataclass(frozen=True)
class Result:
    """The figures. Seconds, MiB, counts."""

    count: int
    children: int
    create_s: float
    settle_s: float
    resident_mib: float
    peak_mib: float
    operator_cpu_s: float
    api_calls: float
    one_more_s: float
    writes_of_two_looks: int
    look_s: float


def deployment(number: int) -> dict[str, Any]:
    """One object; some are bad in a way that only the operator sees."""
    bad = [("spec.engine.vllmVersion", "0.31.0")] if number % BAD_EACH == 0 else []
    return edited(
        smallest(),
        ("metadata.namespace", f"perf-{number % NAMESPACES}"),
        ("metadata.name", f"many-{number}"),
        ("spec.engine.image", "vllm/vllm-openai:v0.32.0"),
        *bad,
    )


def path_of(raw: dict[str, Any] | None = None) -> str:
    """Path of an object, or of all."""
    if raw is None:
        return f"{DEPLOYMENTS.root}/{DEPLOYMENTS.plural}"
    metadata = raw["metadata"]
    return f"{DEPLOYMENTS.root}/namespaces/{metadata['namespace']}/{DEPLOYMENTS.plural}/{metadata['name']}"


def judged(cluster: EmbeddedCluster) -> int:
    """How many objects have a status about their newest spec."""
    items = cluster.api.get(path_of())["items"]
    return sum(one.get("status", {}).get("observedGeneration") == one["metadata"]["generation"] for one in items)


def writes(cluster: EmbeddedCluster, since: int) -> list[AuditEvent]:
    """What the operator has written since a position of the audit log."""
    return [
        event
        for event in cluster.audit_events(since)
        if event.is_write and event.answered and event.user_agent.startswith(AGENTS)
    ]


def at_rest(operator: OperatorProcess) -> bool:
    """Has it nothing to do?"""
    return operator.metric("pd_operator_waiting") == 0


def looks(operator: OperatorProcess, times: int) -> float:
    """Wait for complete looks that begin from now on. Returns seconds of the process's CPU for them, per look."""
    before, cpu = operator.metric("pd_operator_resyncs_total"), operator.metric("process_cpu_seconds_total")
    eventually("looks", lambda: operator.metric("pd_operator_resyncs_total") > before + times, PATIENCE_S)
    eventually("rest", lambda: at_rest(operator), PATIENCE_S)
    return (operator.metric("process_cpu_seconds_total") - cpu) / (times + 1)


def measure(cluster: EmbeddedCluster, count: int, folder: Path) -> Result:
    """Everything, in one operator's life."""
    cluster.kubectl("apply", "--server-side", "-f", str(ROOT / "crds" / "pddeployments.yaml"))
    eventually("definition", lambda: exists(cluster.api, path_of()))
    for number in range(NAMESPACES):
        make_namespace(cluster.api, f"perf-{number}")
    objects = [deployment(number) for number in range(count)]
    with OperatorProcess(cluster.kubeconfig, folder / "operator.log", "--all-namespaces", "--resync", "30") as operator:
        begun = time.monotonic()
        for raw in objects:
            cluster.api.request("PATCH", f"{path_of(raw)}?fieldManager=perf", raw, APPLY)
        created = time.monotonic()
        print(f"{count} objects created after {created - begun:.1f} s", flush=True)
        eventually("all are judged", lambda: judged(cluster) == count, PATIENCE_S)
        eventually("rest", lambda: at_rest(operator), PATIENCE_S)
        settled = time.monotonic()
        print(f"all judged after {settled - begun:.1f} s", flush=True)
        one_more = deployment(count + 1)
        cluster.api.request("PATCH", f"{path_of(one_more)}?fieldManager=perf", one_more, APPLY)
        eventually("one more", lambda: "status" in cluster.api.get(path_of(one_more)), PATIENCE_S)
        added = time.monotonic()
        quiet_by = time.monotonic() + PATIENCE_S
        while True:
            # Controllers go on reporting pods for a while; each report is a change.
            since = cluster.audit_position()
            look_s = looks(operator, 1)
            if not writes(cluster, since) or time.monotonic() > quiet_by:
                break
        since = cluster.audit_position()
        looks(operator, 2)
        calls = operator.metric("pd_operator_api_calls_total")
        status = (Path("/proc") / str(operator.pid) / "status").read_text(encoding="ascii")
        memory = dict(line.split(":", 1) for line in status.splitlines())
        return Result(
            count=count + 1,
            children=sum(
                len(cluster.api.get(f"{kind.root}/{kind.plural}?labelSelector=pdserving.dev/pddeployment")["items"])
                for kind in CHILD_KINDS
            ),
            create_s=round(created - begun, 1),
            settle_s=round(settled - begun, 1),
            resident_mib=round(int(memory["VmRSS"].split()[0]) / 1024, 1),
            peak_mib=round(int(memory["VmHWM"].split()[0]) / 1024, 1),
            operator_cpu_s=round(operator.metric("process_cpu_seconds_total"), 1),
            api_calls=calls,
            one_more_s=round(added - settled, 1),
            writes_of_two_looks=len(writes(cluster, since)),
            look_s=round(look_s, 2),
        )


def main() -> int:
    """Run, print, write `out/perf-deployments/result.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="PDDeployments (default 300)")
    count = parser.parse_args().count
    remove_abandoned()
    out = ROOT / "out" / "perf-deployments"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, cluster_for_tests("perf", Wishes(light=True)) as cluster:
        result = measure(cluster, count, Path(folder))
    (out / "result.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="ascii")
    for name, value in asdict(result).items():
        print(f"{name:<22} {value}")
    good = result.writes_of_two_looks == 0 and result.peak_mib < MEMORY_LIMIT_MIB
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
