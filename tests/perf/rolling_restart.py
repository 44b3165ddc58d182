"""Both decode engines are replaced one after the other under load: ``rolling_restart.py --rounds 3``.

As a rolling update of a StatefulSet does it: the pod is marked for deletion, ends what it has, and a new one comes. No
client may see an error, and no handle of a process that has ended may reach a prefill engine. Fake engines are
processes. Ends with status 1 when either happened.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "connector")]

from support.chat import Talk, assert_right  # noqa: E402
from support.process_fleet import ProcessFleet  # noqa: E402

ENGINE_FLAGS = {"--event-delay": "0.02"}


class Load:
    """Conversations that go on until they are told to end."""

    def __init__(self, fleet: ProcessFleet) -> None:
        self.fleet = fleet
        self.over = False
        self.right = 0
        self.errors: list[str] = []

    async def converse(self, number: int) -> None:
        """Streams and whole answers in turn."""
        while not self.over:
            talk = Talk(self.fleet, tenant=f"t{number}")
            for place in range(6):
                turn = await talk.say(
                    "Go on." if place else "Begin, and take your time. " * 12,
                    check=False,
                    stream=bool((number + place) % 2),
                )
                try:
                    assert turn.status == 200
                    assert_right(self.fleet, turn)
                except AssertionError as error:
                    self.errors.append(f"status {turn.status}, {turn.error}: {turn.raw[-300:]!r} ({error!s:.100})")
                    break
                self.right += 1
                self.fleet.check_seen()
                self.fleet.seen.clear()
                if self.over:
                    return


async def funnel(fleet: ProcessFleet) -> Counter[str]:
    """Turns by stage of reuse, and by the reason why they left it."""
    found: Counter[str] = Counter()
    for name, value in (await fleet.metrics()).items():
        for metric in ("pd_router_reuse_stage_total", "pd_router_reuse_drop_total"):
            if name.startswith(metric):
                found[name.partition('="')[2].rstrip('"}')] += int(value)
    return found


async def stale(fleet: ProcessFleet) -> int:
    """Handles that prefill engines could not use because their holder was gone; they run all the time."""
    count = 0
    for engine in fleet.of_role("prefill"):
        counters = (await fleet.state(engine))["counters"]
        count += sum(counters.get(name, 0) for name in ("failed_transfers", "failed_notifications", "expired"))
    return count


async def main(arguments: argparse.Namespace) -> int:
    """0 when nobody noticed."""
    fleet = ProcessFleet(arguments.prefills, 2, engine_flags=ENGINE_FLAGS)
    try:
        await fleet.start()
        load = Load(fleet)
        talks = [asyncio.create_task(load.converse(number)) for number in range(arguments.conversations)]
        print(f"{'step':24}{'seconds':>8}{'right':>8}{'errors':>8}{'stale':>7}  funnel", flush=True)

        async def step(name: str, began: float, before: Counter[str], right: int) -> None:
            gained = {key: value for key, value in (await funnel(fleet) - before).items() if value}
            print(
                f"{name:24}{time.monotonic() - began:8.1f}{load.right - right:8}{len(load.errors):8}"
                f"{await stale(fleet):7}  {gained}",
                flush=True,
            )

        began, before, right = time.monotonic(), await funnel(fleet), load.right
        await asyncio.sleep(arguments.settle)
        await step("before", began, before, right)
        for number in range(arguments.rounds):
            for engine in fleet.of_role("decode"):
                began, before, right = time.monotonic(), await funnel(fleet), load.right
                await fleet.replace(engine)
                await fleet.wait_ready(len(fleet.processes))
                await asyncio.sleep(arguments.settle)
                await step(f"round {number + 1}: {engine.pod}", began, before, right)
        load.over = True
        await asyncio.gather(*talks)
        breaches = (await fleet.verdict())["violations"]
        stale_handles = await stale(fleet)
        for line in [*load.errors, *breaches]:
            print(f"PROBLEM {line}")
        print(
            f"{load.right} turns, {len(load.errors)} client errors, {stale_handles} stale handles, "
            f"{len(breaches)} breaches; {arguments.rounds * 2} decode engines replaced"
        )
    finally:
        await fleet.stop()
    return 1 if load.errors or stale_handles or breaches else 0


def parse() -> argparse.Namespace:
    """The command line. Seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=24, help="at one time")
    parser.add_argument("--prefills", type=int, default=2)
    parser.add_argument("--settle", type=float, default=3.0, help="before each step")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
