"""Two tenants with equal ids and equal texts: ``foreign_id.py --rounds 2500`` (four turns each).

In each round one tenant has two turns under an id, and the other then asks the same under that id and under one that
nobody ever used, in random order. The other must never get what the first left, and must not be able to tell by the
clock that there is something. The clock's verdict is the share of pairs in which the id of the other took longer: a
half where nothing can be told. Real router, fake engines whose answers show whose blocks they used. Ends with status 1
when a handle crossed over, an answer is wrong, or the share is more than four standard errors from a half.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "connector")]

from support.chat import Talk  # noqa: E402
from support.deployment import Deployment, Spec  # noqa: E402

TEXT = "Tell me all of it, from the beginning. " * 12


async def timed(talk: Talk, text: str) -> tuple[float, int]:
    """Milliseconds of a turn that is checked, and handles that went out for it."""
    started = time.perf_counter()
    turn = await talk.say(text)
    return (time.perf_counter() - started) * 1e3, len(turn.attached)


async def play(rounds: int, seed: int) -> int:
    """Returns the exit status."""
    choice = random.Random(seed)
    deployment = Deployment(Spec())
    await deployment.start()
    own: list[float] = []
    foreign: list[float] = []
    unknown: list[float] = []
    crossed = reused = 0
    for number in range(rounds):
        used, unused = f"id-{number}", f"id-{number}-that-nobody-used"
        first = Talk(deployment, tenant="one", opening="", conversation_id=used)
        await first.say(TEXT)
        took, attached = await timed(first, "And then?")
        own.append(took)
        reused += attached
        asked = [(foreign, used), (unknown, unused)]
        choice.shuffle(asked)
        for times, name in asked:
            took, attached = await timed(Talk(deployment, tenant="two", opening="", conversation_id=name), TEXT)
            times.append(took)
            crossed += attached
        deployment.seen.clear()
        for engine in deployment.engines:
            engine.generates.clear()
        if (number + 1) % 250 == 0:
            print(f"[{4 * (number + 1):6d} turns] {crossed} crossed", flush=True)
    await deployment.stop()
    return judge(own, foreign, unknown, crossed, reused)


def judge(own: Sequence[float], foreign: Sequence[float], unknown: Sequence[float], crossed: int, reused: int) -> int:
    """Print the table; returns the exit status."""
    print(f"turns {2 * len(own) + len(foreign) + len(unknown)}, all answers right")
    print(f"handles of the tenant's own that were used: {reused} of {len(own)}; of the other's: {crossed}")
    for name, times in (("own id, with reuse", own), ("the other's id", foreign), ("an id that nobody used", unknown)):
        print(f"{name:<24} median {median(times):6.2f} ms")
    share = sum((a > b) + 0.5 * (a == b) for a, b in zip(foreign, unknown, strict=True)) / len(foreign)
    error = 0.5 / len(foreign) ** 0.5
    print(f"the other's id took longer in {share:.3f} of the pairs; 0.5 ± {error:.3f} where nothing can be told")
    return int(bool(crossed) or reused == 0 or abs(share - 0.5) > 4 * error)


def main() -> int:
    """Play and judge."""
    parser = argparse.ArgumentParser(description="can a tenant use, or feel, what another one left?")
    parser.add_argument("--rounds", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return asyncio.run(play(options.rounds, options.seed))


if __name__ == "__main__":
    sys.exit(main())
