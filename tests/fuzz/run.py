"""`make fuzz`: many inputs to each target, with progress; ends with 1 at the first one that fails, and says which.

    python tests/fuzz/run.py --inputs 1200000 --seed 1
    python tests/fuzz/run.py --only http --first 4711 --inputs 1      # the one that failed

Inputs are numbered, and seed and number make an input again. They are shared out over processes.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("router", "connector", "tests")]

from fuzz import bodies, engine_answers, event_stream, http_boundary  # noqa: E402 - the paths come first

TARGETS: dict[str, Callable[[random.Random], None]] = {
    "http": http_boundary.one,
    "answer": engine_answers.one,
    "stream": event_stream.one,
    "body": bodies.one,
}
SHARES = {"http": 0.35, "answer": 0.1, "stream": 0.25, "body": 0.3}
BATCH = 2000
HANG_SECONDS = 120.0
"""A batch takes about a second; one that takes so long hangs, and its stack is printed."""


def generator(seed: int, number: int) -> random.Random:
    """The randomness of one input."""
    return random.Random(seed << 40 | number)


def run(target: str, seed: int, first: int, count: int) -> str | None:
    """Run inputs `first` to `first + count`; the first failure as text, or None."""
    one = TARGETS[target]
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        for number in range(first, first + count):
            try:
                one(generator(seed, number))
            except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
                again = f"--only {target} --seed {seed} --first {number} --inputs 1"
                return (
                    f"{target}: input {number} fails; again: python tests/fuzz/run.py {again}\n{traceback.format_exc()}"
                )
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def _batch(job: tuple[str, int, int, int]) -> tuple[str, int, str | None]:
    target, seed, first, count = job
    return target, count, run(target, seed, first, count)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the router's boundaries.")
    parser.add_argument("--inputs", type=int, default=1_200_000, help="in total (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of each target")
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    args = parser.parse_args()
    shares = {args.only: 1.0} if args.only else SHARES
    jobs = []
    for target, share in shares.items():
        count = max(1, round(args.inputs * share))
        jobs += [(target, args.seed, args.first + start, min(BATCH, count - start)) for start in range(0, count, BATCH)]
    jobs.sort(key=lambda job: job[2])  # all targets go on side by side
    total, done, started = sum(job[3] for job in jobs), dict.fromkeys(shares, 0), time.monotonic()
    shown = started
    with multiprocessing.Pool(args.processes) as pool:
        for target, count, failure in pool.imap_unordered(_batch, jobs):
            if failure is not None:
                print(failure, file=sys.stderr)
                return 1
            done[target] += count
            now = time.monotonic()
            if now - shown > 5 or sum(done.values()) == total:
                shown = now
                seconds = now - started
                each = ", ".join(f"{name} {number:,}" for name, number in done.items())
                print(
                    f"{sum(done.values()):>10,} of {total:,}  {sum(done.values()) / seconds:8,.0f}/s  ({each})",
                    flush=True,
                )
    print(f"no failure in {total:,} inputs, {time.monotonic() - started:.0f} s, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
