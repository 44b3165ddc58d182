"""Unpinned against Pinned retention on one real pair, in one run: ``python tests/perf/retention.py``.

What a reused turn costs on prefill with either, in turn, and what decode admits when conversations don't come back.
The engines are vLLM's CPU build; ratios hold for them. Needs a quiet machine and about ten minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.by_hand import prefill, prompt, turn
from support.engine_pair import Pair, racing_deployment

BLOCK = 32
TURN = 1500
NEXT = TURN + 60
ONE_SHOT = 1000
PER_CONVERSATION = -(-(ONE_SHOT + 4) // BLOCK)
ROOM = 4.5
"""Conversations that decode's pool has room for in the second part."""


class Bench:
    """A pair, and the file that says how decode retains."""

    def __init__(self, pair: Pair, race: Path) -> None:
        self.pair, self._pinned = pair, race / "pinned"

    def retain(self, mode: str) -> None:
        """From the next turn on."""
        if mode == "Pinned":
            self._pinned.touch()
        else:
            self._pinned.unlink(missing_ok=True)

    async def latency(self, pairs: int) -> dict[str, list[float]]:
        """Seconds of the second turn's prefill, by what was done."""
        seen: dict[str, list[float]] = {"recompute": [], "Pinned": [], "Unpinned": []}
        for number in range(pairs + 1):
            for mode in seen:
                tokens = prompt(2 * number + 1, TURN)
                longer = [*tokens, *prompt(2 * number + 2, NEXT)[TURN:]]
                self.retain(mode)
                handle = await turn(self.pair, tokens) if mode != "recompute" else None
                again = await prefill(self.pair, longer, handle)
                if handle is not None and again.pulled < TURN // BLOCK * BLOCK:
                    raise SystemExit(f"{mode}: {again.pulled} of {TURN} tokens pulled, {again.report}")
                if number:  # the first of each is a warm-up
                    seen[mode].append(again.seconds)
        return seen

    async def admission(self, mode: str, conversations: int, patience: float) -> tuple[int, float]:
        """Conversations answered one after the other until one waits longer than ``patience`` seconds, and how long."""
        self.retain(mode)
        began = time.monotonic()
        for number in range(conversations):
            try:
                await asyncio.wait_for(turn(self.pair, prompt(1000 + number, ONE_SHOT)), patience)
            except TimeoutError:
                return number, time.monotonic() - began - patience
        return conversations, time.monotonic() - began

    async def returning(self, conversations: int) -> int:
        """How many tokens of as many conversations are read back in their second turn."""
        self.retain("Unpinned")
        pulled = 0
        for number in range(conversations):
            tokens = prompt(3000 + number, ONE_SHOT)
            handle = await turn(self.pair, tokens)
            again = await prefill(self.pair, [*tokens, *prompt(4000 + number, NEXT)[ONE_SHOT : ONE_SHOT + 60]], handle)
            pulled += again.pulled
        return pulled


async def measure(options: argparse.Namespace) -> None:
    """Both parts, each with its own pair."""
    race = Path(tempfile.mkdtemp(prefix="pd-race-"))
    pair = await Pair.start(racing_deployment(BLOCK, 1024), Path(tempfile.mkdtemp()), race)
    try:
        seen = await Bench(pair, race).latency(options.pairs)
    finally:
        await pair.stop()
    middle = {mode: statistics.median(values) for mode, values in seen.items()}
    for mode, values in seen.items():
        print(f"{mode:<10} median {middle[mode] * 1e3:7.1f} ms  {_spread(values)}  n={len(values)}", flush=True)
    print(f"Unpinned / Pinned = {middle['Unpinned'] / middle['Pinned']:.3f}", flush=True)

    pool = int(PER_CONVERSATION * ROOM) + 1
    pair = await Pair.start(racing_deployment(BLOCK, pool), Path(tempfile.mkdtemp()), race)
    try:
        bench = Bench(pair, race)
        print(f"decode: {pool} blocks, {PER_CONVERSATION} per conversation", flush=True)
        answered, seconds = await bench.admission("Unpinned", options.conversations, 60)
        print(f"Unpinned: {answered} conversations answered in {seconds:.1f} s, {answered / seconds:.2f}/s", flush=True)
        print(f"Unpinned: 4 that come back read {await bench.returning(4)} tokens", flush=True)
        stalled, spent = await bench.admission("Pinned", options.conversations, 60)
        print(f"Pinned: {stalled} answered in {spent:.1f} s, then none within 60 s", flush=True)
        rate = stalled / (spent + 60)
        print(f"requests/s over that time: {answered / seconds / rate:.1f} times", flush=True)
    finally:
        await pair.stop()


def _spread(values: Sequence[float]) -> str:
    return f"({min(values) * 1e3:.1f} – {max(values) * 1e3:.1f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=80, help="second turns per mode")
    parser.add_argument("--conversations", type=int, default=100, help="that don't come back")
    asyncio.run(measure(parser.parse_args()))
