"""CPU per streamed turn of our router and of its peers, side by side: ``python tests/perf/router.py``.

All routers run during the whole comparison, each pinned to the same core, and one at a time is under load, in turn:
A B C A B C … The other core has the load generator and the canned engines. The figure is the CPU time of the router's
process tree per finished turn; the wall clock does not enter it. See README.md beside this file.

Exit status: 0, or 1 when a router did not do its work or ours costs more than ``--max-ratio`` times ``--against``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from perf.check import read_counters, set_up_engines, verify, verify_run, wait_until_serving
from perf.contenders import CONTENDERS, OURS, VLLM_ROUTER, VLLM_ROUTER_LEAN, Contender, Place
from perf.errors import PerfError
from perf.load import Load, Outcome, Shape
from perf.processes import CpuTime, Program, core_busy_s, free_ports, start, tree_cpu, two_cores
from perf.provision import Peers, ensure_peers, ensure_programs
from perf.report import Row, Sample, as_json, as_table, summarise

_ROOT: Final = Path(__file__).resolve().parents[2]
_ENGINE: Final = Path(__file__).with_name("canned_engine.py")
GAPS_MS: Final = {"token by token": 1.0, "burst": 0.0}
"""Milliseconds between two tokens."""
_SETTLE_S: Final = 0.3
_PRIME_LIMIT_S: Final = 180.0
_RETRIES: Final = 2
_QUIET_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Mode:
    """One kind of load: ms between two tokens, and turns under way at the same time."""

    gap_ms: float
    connections: int


def _modes(connections: Sequence[int]) -> dict[str, Mode]:
    return {f"{name}, {count} at once": Mode(gap, count) for count in connections for name, gap in GAPS_MS.items()}


@dataclass(slots=True)
class Runner:
    """A contender that is up, with its engines."""

    contender: Contender
    place: Place
    engines: Program
    router: Program
    answer_bytes: int = 0

    def stop(self) -> None:
        """End the router, then its engines."""
        self.router.stop()
        self.engines.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    options = _parse(arguments)
    # The programs are in sessions of their own: being told to stop has to reach the `finally` that ends them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _compare(options)
    except PerfError as error:
        print(f"perf-router: {error}", file=sys.stderr)
        return 1


def _compare(options: argparse.Namespace) -> int:
    router_core, load_core = two_cores()
    ensure_programs()
    peers = ensure_peers()
    shape = Shape(connections=max(options.connections))
    load = Load(shape, load_core)
    chosen = [contender for contender in CONTENDERS if contender.name in options.routers]
    with _running(chosen, peers, shape, router_core, load_core, options.out) as runners:
        for runner in runners:
            _prime(runner, load)
        samples = list(_measure(runners, load, router_core, options))
    baselines = [name for name in (VLLM_ROUTER, VLLM_ROUTER_LEAN) if name in options.routers]
    rows = summarise(samples, baselines)
    print("\n" + as_table(rows, {contender.name: contender.title for contender in chosen}, baselines))
    noise = max(row.foreign_share for row in rows)
    if noise > _QUIET_SHARE:
        print(f"\nNOT A QUIET RUN: others used up to {noise:.0%} of the router's core; read ratios only, and repeat it")
    about = {
        "shape": asdict(shape),
        "modes": {name: asdict(mode) for name, mode in _modes(options.connections).items()},
        "rounds": options.rounds,
        "seconds": options.seconds,
        "machine": platform.platform(),
        "python": platform.python_version(),
        "cores": {"router": router_core, "load_and_engines": load_core},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    result = options.out / "result.json"
    result.write_text(json.dumps(as_json(samples, rows, about), indent=1) + "\n")
    print(f"\nwritten to {result}")
    return _judge(rows, options.against, options.max_ratio)


@contextmanager
def _running(
    chosen: Sequence[Contender], peers: Peers, shape: Shape, router_core: int, load_core: int, out: Path
) -> Iterator[list[Runner]]:
    runners: list[Runner] = []
    try:
        for contender in chosen:
            print(f"==> starting {contender.title}", flush=True)
            place = Place(*free_ports(4))
            engines = start(
                f"{contender.name}'s engines",
                [
                    *(sys.executable, str(_ENGINE), "--connector", contender.connector, "--tokens", str(shape.tokens)),
                    *("--prefill-port", str(place.prefill), "--decode-port", str(place.decode)),
                ],
                load_core,
                out / f"{contender.name}.engines.log",
            )
            log = out / f"{contender.name}.log"
            router = start(contender.name, contender.command(place, peers), router_core, log, contender.environment)
            runner = Runner(contender, place, engines, router)
            runners.append(runner)
            wait_until_serving(contender, place, router)
            runner.answer_bytes = verify(contender, place, shape)
            print(f"    answers are whole ({runner.answer_bytes} bytes), both legs seen by the engines", flush=True)
        yield runners
    finally:
        for runner in runners:
            runner.stop()


def _prime(runner: Runner, load: Load) -> None:
    """Give every conversation a first turn, so that the measured ones are follow-up turns."""
    set_up_engines(runner.place, 0.0)
    turns, deadline = 0, time.monotonic() + _PRIME_LIMIT_S
    while turns < load.shape.conversations + 2 * load.shape.connections:
        outcome = load.run(runner.place.url, 2)
        turns += outcome.turns
        if outcome.faults or time.monotonic() > deadline:
            raise PerfError(
                f"{runner.contender.title} finished {turns} turns while it was warmed up, faults: {outcome.faults};"
                f" see {runner.router.log}"
            )


def _measure(runners: Sequence[Runner], load: Load, router_core: int, options: argparse.Namespace) -> Iterator[Sample]:
    for round_ in range(1, options.rounds + 1):
        for name, mode in _modes(options.connections).items():
            for runner in runners:
                sample = _sample_with_retry(runner, load, router_core, name, mode, round_, options.seconds)
                print(
                    f"round {round_}/{options.rounds}  {name:<29} {runner.contender.title:<26}"
                    f" {sample.cpu_ms_per_turn:7.3f} ms/turn {sample.turns_per_s:6.0f} turns/s"
                    f"   others on the core {sample.foreign_share:4.0%}   load {sample.load_average:.1f}",
                    flush=True,
                )
                yield sample


def _sample_with_retry(
    runner: Runner, load: Load, router_core: int, name: str, mode: Mode, round_: int, seconds: int
) -> Sample:
    """A run whose checks fail is repeated, for a machine that others use; a router that fails twice more is out."""
    faults: list[str] = []
    for _ in range(1 + _RETRIES):
        set_up_engines(runner.place, mode.gap_ms)
        load.run(runner.place.url, 1, mode.connections)
        time.sleep(_SETTLE_S)
        set_up_engines(runner.place, mode.gap_ms)
        outcome, cpu, foreign_share = _observe(runner, load, router_core, seconds, mode.connections)
        time.sleep(_SETTLE_S)
        runner.router.assert_running()
        counters = read_counters(runner.place)
        faults = verify_run(
            runner.contender, replace(load.shape, connections=mode.connections), outcome, counters, runner.answer_bytes
        )
        if not faults:
            return Sample(
                contender=runner.contender.name,
                mode=name,
                round=round_,
                cpu_ms_per_turn=cpu.total * 1e3 / outcome.turns,
                kernel_ms_per_turn=cpu.kernel * 1e3 / outcome.turns,
                turns=outcome.turns,
                turns_per_s=outcome.turns_per_s,
                p50_ms=outcome.p50_ms,
                p99_ms=outcome.p99_ms,
                attached_share=counters["attached"] / counters["prefills"],
                foreign_share=foreign_share,
                load_average=os.getloadavg()[0],
            )
        print(f"    {runner.contender.title}, {name}: run thrown away: {'; '.join(faults)}", flush=True)
    raise PerfError(f"{runner.contender.title}, {name}: {'; '.join(faults)}; see {runner.router.log}")


def _observe(
    runner: Runner, load: Load, router_core: int, seconds: int, connections: int
) -> tuple[Outcome, CpuTime, float]:
    pid = runner.router.process.pid
    started, before, busy_before = time.monotonic(), tree_cpu(pid), core_busy_s(router_core)
    outcome = load.run(runner.place.url, seconds, connections)
    cpu = tree_cpu(pid) - before
    busy_s = core_busy_s(router_core) - busy_before
    wall_s = time.monotonic() - started
    return outcome, cpu, max(0.0, busy_s - cpu.total) / wall_s


def _judge(rows: Sequence[Row], against: str, max_ratio: float) -> int:
    status = 0
    for row in rows:
        if row.contender == OURS and against in row.ratios:
            ratio = row.ratios[against]
            met = ratio.median <= max_ratio
            status |= not met
            print(
                f"{row.mode}: ours costs {ratio.median:.2f} of {against} ({ratio.low:.2f} – {ratio.high:.2f});"
                f" at most {max_ratio:.2f}: {'met' if met else 'NOT MET'}"
            )
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [contender.name for contender in CONTENDERS]
    parser = argparse.ArgumentParser(description="CPU per streamed turn of our router and its peers, side by side")
    parser.add_argument("--routers", default=",".join(names), help=f"comma-separated, of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=4, help="of one measured run")
    parser.add_argument(
        "--connections",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[16, 64, 256],
        help="comma-separated: turns under way at the same time, one comparison for each",
    )
    parser.add_argument("--against", default=VLLM_ROUTER, choices=names, help="the peer that --max-ratio refers to")
    parser.add_argument("--max-ratio", type=float, default=0.8)
    parser.add_argument("--out", type=Path, default=_ROOT / "out" / "perf-router")
    options = parser.parse_args(arguments)
    options.routers = options.routers.split(",")
    unknown = sorted(set(options.routers) - set(names))
    if unknown:
        parser.error(f"no such router: {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
