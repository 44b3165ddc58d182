"""Many conversations at once while engines die, hang, slow down and come back: ``chaos.py --minutes 10 --seed 7``.

Fake engines are processes, so that they can be killed and stopped by the kernel; they compute the answer from the KV
that they really have, so a wrong block is a wrong text. One engine per role is in trouble at a time, or (a blackout)
all of a role. So it is known what must happen: outside blackouts every turn is answered, and a stream
breaks only when an engine that sends streams is in trouble. Ends with status 1 when anything else happened.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "connector")]

from support.chat import TEXT, Talk, Turn, assert_right  # noqa: E402
from support.fake_engine import Kind, Point  # noqa: E402
from support.process_fleet import EngineProcess, ProcessFleet  # noqa: E402
from support.redis_server import RedisServer  # noqa: E402
from support.waiting import until  # noqa: E402

FLAGS: Final = {
    "--handle-ttl": "25",
    "--engine-ttl": "40",
    "--connect-timeout": "1",
    "--prefill-timeout": "4",
    "--pull-timeout": "3",
    "--first-byte-timeout": "4",
    "--answer-timeout": "8",
    "--idle-timeout": "3",
    "--probe-interval": "0.2",
    "--probe-timeout": "1",
    "--pair-quarantine": "3",
    "--bypass-tokens": "24",
}
ENGINE_FLAGS: Final = {"--ttl": "40", "--lease": "30", "--event-delay": "0.01"}
GRACE: Final = 1.0
"""Seconds after a fault's end in which its consequences may still be seen."""
LEFTOVERS_SECONDS: Final = 60.0

STREAM_FAULTS: Final = (
    (Kind.CLOSE, Point.AFTER_FIRST_CONTENT),
    (Kind.RESET, Point.AFTER_FIRST_CONTENT),
    (Kind.RESET, Point.BEFORE_FINISH),
    (Kind.ERROR_EVENT, Point.AFTER_FIRST_CONTENT),
    (Kind.TRUNCATE, Point.BEFORE_FINISH),
    (Kind.CLOSE, Point.BEFORE_DONE),
)
LEG_FAULTS: Final = (
    (Kind.STATUS, Point.BEFORE_HEADERS),
    (Kind.CLOSE, Point.BEFORE_HEADERS),
    (Kind.RESET, Point.BEFORE_HEADERS),
    (Kind.FINISH_ERROR, Point.AFTER_HEADERS),
)


@dataclass(slots=True)
class Trouble:
    """One fault. ``breaks``: streams that run on it may break; ``blackout``: turns may be refused."""

    kind: str
    role: str
    began: float
    ended: float = float("inf")
    breaks: bool = False
    blackout: bool = False

    def meets(self, began: float, ended: float) -> bool:
        """Whether a turn of that time may have noticed."""
        return self.began <= ended and began <= self.ended + GRACE


@dataclass(slots=True)
class Outcomes:
    """What became of turns."""

    troubles: list[Trouble] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    by_kind: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def note(self, result: str, began: float, ended: float) -> None:
        """Count a turn, and once for each kind of trouble that it met."""
        self.turns[result] += 1
        for kind in {trouble.kind for trouble in self.troubles if trouble.meets(began, ended)}:
            self.by_kind[kind][result] += 1

    def excused(self, began: float, ended: float, *, refused: bool) -> bool:
        """Whether a turn of that time may have failed: been refused, or broken off."""
        return any(
            trouble.meets(began, ended) and (trouble.blackout if refused else trouble.breaks)
            for trouble in self.troubles
        )


class Chaos:
    """One run."""

    def __init__(
        self, fleet: ProcessFleet, store: RedisServer | None, seed: int, seconds: float, conversations: int
    ) -> None:
        self.fleet, self.store, self.seed, self.conversations = fleet, store, seed, conversations
        self.ends = time.monotonic() + seconds
        self.out = Outcomes()
        self.roles = {"prefill": asyncio.Lock(), "decode": asyncio.Lock()}
        """Held by what is wrong with one engine of the role, or with all of them."""

    @property
    def over(self) -> bool:
        """Whether no new turn begins."""
        return time.monotonic() >= self.ends

    async def run(self) -> None:
        """Converse and make trouble until the time is over, then look at what is left."""
        talks = [asyncio.create_task(self.converse(number)) for number in range(self.conversations)]
        trouble = [
            asyncio.create_task(self.trouble_role("prefill")),
            asyncio.create_task(self.trouble_role("decode")),
            asyncio.create_task(self.trouble_all()),
            asyncio.create_task(self.say_how_it_goes()),
        ]
        await asyncio.gather(*talks)
        await asyncio.gather(*trouble)
        await self.look_at_leftovers()

    # --- clients ------------------------------------------------------------------------------
    async def converse(self, number: int) -> None:
        draw = random.Random(self.seed * 1000 + number)
        while not self.over:
            fields = {"conversation_id": f"{self.seed}-{number}"} if draw.random() < 0.3 else {}
            talk = Talk(self.fleet, tenant=f"t{number % 5}", **fields)
            for _ in range(draw.randint(2, 9)):
                if self.over:
                    return
                await self.turn(talk, draw)
                await asyncio.sleep(draw.random() * 0.3)

    async def turn(self, talk: Talk, draw: random.Random) -> None:
        text: str | None = draw.choice(["Go on.", "And then? " + TEXT, "Why?", "Tell me more of it. " * 5])
        if talk.messages and talk.messages[-1]["role"] == "assistant" and draw.random() < 0.1:
            del talk.messages[-1]  # the last answer again
            text = None
        elif talk.messages and draw.random() < 0.05:
            talk.messages[0] = {**talk.messages[0], "content": f"Edited. {TEXT}"}
        asking = asyncio.create_task(talk.say(text, check=False, stream=draw.random() < 0.7))
        began = time.monotonic()
        if draw.random() < 0.1:
            await asyncio.wait([asking], timeout=draw.random() * 0.6)
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                self.out.note("client left", began, time.monotonic())
                return
        try:
            turn = await asking
        except TimeoutError:
            self.problem(f"no answer within 30 s, asked {began - self.ends:+.1f} s from the end")
            return
        self.judge(talk, turn, began, time.monotonic())
        if turn.status != 200:
            await asyncio.sleep(0.3)

    def judge(self, talk: Talk, turn: Turn, began: float, ended: float) -> None:
        """Put an answer into its class, or complain."""
        try:
            self.fleet.check_seen()
        except AssertionError as error:
            self.problem(f"a client was shown something of a handle: {error}")
        self.fleet.seen.clear()
        if turn.status != 200:
            self.forget_turn(talk, turn)
            self.judge_refusal(turn, began, ended)
            return
        try:
            assert_right(self.fleet, turn)
        except (AssertionError, KeyError, ValueError, IndexError) as wrong:
            self.forget_turn(talk, turn)
            self.judge_broken(turn, began, ended, wrong)
            return
        self.out.note("right", began, ended)

    def judge_refusal(self, turn: Turn, began: float, ended: float) -> None:
        with suppress(ValueError, KeyError):
            code = turn.json["error"]["code"]
            proper = turn.status in (502, 504) or (turn.status == 503 and int(turn.headers.get("Retry-After", 0)) >= 1)
            if proper and self.out.excused(began, ended, refused=True):
                self.out.statuses[f"{turn.status} {code}"] += 1
                self.out.note("refused", began, ended)
                return
        self.problem(f"status {turn.status} after {ended - began:.2f} s: {turn.raw[:300]!r}")

    def judge_broken(self, turn: Turn, began: float, ended: float, wrong: Exception) -> None:
        right = self.fleet.right(turn.body).content
        with suppress(ValueError, KeyError, IndexError, AssertionError):
            events = [event for event in turn.events if event != "[DONE]"]
            said = "".join(
                event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices")
            )
            errors = [event for event in events if "error" in event]
            # Ended by one error event; or every word is there and only the end of the stream is missing.
            if right.startswith(said) and len(errors) == 1 and self.out.excused(began, ended, refused=False):
                self.out.note("broken off", began, ended)
                return
        self.problem(f"a wrong answer ({wrong!r:.100}): {turn.raw[-500:]!r}, right: {right!r}, error {turn.error}")

    def forget_turn(self, talk: Talk, turn: Turn) -> None:
        talk.messages = list(turn.body["messages"][:-1])

    def problem(self, text: str) -> None:
        self.out.problems.append(text)
        print(f"PROBLEM {text}", flush=True)

    # --- trouble ------------------------------------------------------------------------------
    async def trouble_role(self, role: str) -> None:
        """One engine of the role after the other."""
        draw = random.Random(f"{self.seed}-{role}")
        kinds: dict[str, Callable[[EngineProcess, random.Random], Awaitable[None]]] = {
            "killed": self.killed,
            "restarted at once": self.restarted,
            "hung": self.hung,
            "slow": self.slow,
            "fails": self.fails,
            "cut off from a peer": self.cut_off,
            "drained and replaced": self.drained,
        }
        if role == "decode":
            kinds["breaks streams"] = self.breaks_streams
        order: list[str] = []
        while not self.over:
            if not order:
                order = draw.sample(sorted(kinds), len(kinds))
            kind = order.pop()
            engine = draw.choice(self.fleet.of_role(role))
            async with self.roles[role]:
                trouble = Trouble(f"{role} {kind}", role, time.monotonic())
                trouble.breaks = role == "decode" and kind in ("killed", "restarted at once", "hung", "breaks streams")
                await self.last(trouble, kinds[kind](engine, draw))
            await asyncio.sleep(draw.random() * 1.5)

    async def last(self, trouble: Trouble, going_on: Awaitable[None]) -> None:
        """Count a trouble from now until the router has got over it."""
        self.out.troubles.append(trouble)
        try:
            await going_on
            await self.recovered()
        except TimeoutError as error:
            self.problem(f"{trouble.kind}: {error}")
        trouble.ended = time.monotonic()

    async def trouble_all(self) -> None:
        """The API server goes away; now and then a whole role does."""
        draw = random.Random(f"{self.seed}-all")
        while not self.over:
            await asyncio.sleep(5 + draw.random() * 5)
            if self.over:
                return
            chance = draw.random()
            if self.store is not None and chance < 0.4:
                await self.trouble_store(self.store, draw)
                continue
            if chance < 0.7:
                trouble = Trouble("API server away", "", time.monotonic())
                self.out.troubles.append(trouble)
                await self.fleet.api.stop()
                await asyncio.sleep(2 + draw.random() * 6)
                await self.fleet.api.start()
                trouble.ended = time.monotonic()
                continue
            role = draw.choice(["prefill", "decode"])
            async with self.roles["prefill"], self.roles["decode"]:
                trouble = Trouble(f"every {role} engine killed", role, time.monotonic(), breaks=True, blackout=True)
                await self.last(trouble, self.black_out(role, draw))

    async def trouble_store(self, store: RedisServer, draw: random.Random) -> None:
        """The handle store is killed and comes back empty, or it hangs: reuse is missed and nothing else."""
        hangs = draw.random() < 0.5
        trouble = Trouble("store hung" if hangs else "store killed", "", time.monotonic())
        self.out.troubles.append(trouble)
        if hangs:
            store.freeze()
            await asyncio.sleep(1 + draw.random() * 4)
            store.thaw()
        else:
            store.kill()
            await asyncio.sleep(draw.random() * 3)
            await store.start()
        trouble.ended = time.monotonic()

    async def black_out(self, role: str, draw: random.Random) -> None:
        engines = self.fleet.of_role(role)
        await asyncio.gather(*(self.fleet.kill(engine) for engine in engines))
        await asyncio.sleep(1 + draw.random() * 2)
        await asyncio.gather(*(self.fleet.up(engine, new_pod=False) for engine in engines))

    async def recovered(self) -> None:
        """Wait until the router gives work to every engine again, or would by its next trial. Raises TimeoutError."""

        late: list[Any] = []

        async def all_ready() -> bool:
            late[:] = members = await self.fleet.fleet()
            return len(members) == len(self.fleet.processes) and all(
                member["ready"] and not member["draining"] and member["breaker"] != "open" for member in members
            )

        try:
            await until(all_ready, 60.0, 0.1)
        except TimeoutError as error:
            raise TimeoutError(f"not all engines came back: {json.dumps(late)}") from error

    async def killed(self, engine: EngineProcess, draw: random.Random) -> None:
        await self.fleet.kill(engine)
        await asyncio.sleep(0.5 + draw.random() * 2)
        await self.fleet.up(engine, new_pod=False)

    async def restarted(self, engine: EngineProcess, _draw: random.Random) -> None:
        await self.fleet.kill(engine)
        await self.fleet.up(engine, new_pod=False)

    async def hung(self, engine: EngineProcess, draw: random.Random) -> None:
        self.fleet.signal(engine, signal.SIGSTOP)
        await asyncio.sleep(1 + draw.random() * 5)
        self.fleet.signal(engine, signal.SIGCONT)

    async def slow(self, engine: EngineProcess, draw: random.Random) -> None:
        await self.fleet.order(engine, event_delay=0.15, pull_delay=0.5)
        await asyncio.sleep(1 + draw.random() * 3)
        await self.fleet.order(engine, well=True)

    async def fails(self, engine: EngineProcess, draw: random.Random) -> None:
        kind, point = draw.choice(LEG_FAULTS)
        await self.fleet.order(engine, fault=kind, at=point, status=draw.choice([500, 503]), times=draw.randint(1, 5))
        await asyncio.sleep(1 + draw.random() * 2)
        await self.fleet.order(engine, well=True)

    async def breaks_streams(self, engine: EngineProcess, draw: random.Random) -> None:
        kind, point = draw.choice(STREAM_FAULTS)
        await self.fleet.order(engine, fault=kind, at=point, times=draw.randint(1, 3))
        await asyncio.sleep(1 + draw.random() * 2)
        await self.fleet.order(engine, well=True)

    async def cut_off(self, engine: EngineProcess, draw: random.Random) -> None:
        other = draw.choice(self.fleet.of_role("decode" if engine.role == "prefill" else "prefill"))
        await self.fleet.order(engine, cut_off=[other.name])
        await asyncio.sleep(2 + draw.random() * 3)
        await self.fleet.order(engine, well=True)

    async def drained(self, engine: EngineProcess, _draw: random.Random) -> None:
        await self.fleet.replace(engine)

    async def say_how_it_goes(self) -> None:
        begun = time.monotonic()
        while not self.over:
            await asyncio.sleep(min(15.0, max(0.1, self.ends - time.monotonic())))
            count = ", ".join(f"{number} {name}" for name, number in self.out.turns.most_common())
            print(f"[{time.monotonic() - begun:4.0f} s] {len(self.out.troubles)} troubles; turns: {count}", flush=True)

    # --- the end ------------------------------------------------------------------------------
    async def look_at_leftovers(self) -> None:
        """Nothing runs, nothing is counted as running, nothing is kept for ever, and the judge has seen no breach."""
        found: dict[str, Any] = {}

        async def at_rest() -> bool:
            found.clear()
            for name, value in (await self.fleet.metrics()).items():
                if value and name.startswith(("pd_router_inflight", "pd_router_queued", "pd_router_leg_inflight")):
                    found[name] = value
            for member in await self.fleet.fleet():
                if member["turns"] or member["prefill_tokens"] or any(member["ranks"].values()):
                    found[member["engine"]] = member
            for engine in self.fleet.processes:
                state = await self.fleet.state(engine)
                if state["running"] or state["retained"] or state["used_blocks"]:
                    found[engine.name] = state
            return not found

        try:
            await until(at_rest, LEFTOVERS_SECONDS, 0.5)
        except TimeoutError:
            self.problem(f"left over at the end: {json.dumps(found)}")
        for violation in (await self.fleet.verdict())["violations"]:
            self.problem(f"breach at an engine: {violation}")
        try:
            self.fleet.check_log()
        except AssertionError as error:
            self.problem(f"in the router's log: {str(error)[:2000]}")

    async def report(self) -> None:
        """The table."""
        out = self.out
        columns = ("right", "broken off", "refused", "client left")
        kinds = Counter(trouble.kind for trouble in out.troubles)
        width = max(map(len, [*kinds, "all turns"])) + 2
        print(f"\n{'trouble':{width}}{'times':>6}  turns that met it: " + "".join(f"{name:>12}" for name in columns))
        for kind, times in sorted(kinds.items()):
            met = out.by_kind[kind]
            print(f"{kind:{width}}{times:>6}{'':>21}" + "".join(f"{met[name]:>12}" for name in columns))
        print(f"{'all turns':{width}}{'':>6}{'':>21}" + "".join(f"{out.turns[name]:>12}" for name in columns))
        print(f"refusals (in blackouts only): {dict(out.statuses) or 'none'}")
        verdict, samples = await self.fleet.verdict(), await self.fleet.metrics()
        stages = {
            name.partition('stage="')[2].rstrip('"}'): int(value)
            for name, value in samples.items()
            if name.startswith("pd_router_reuse_stage_total")
        }
        retried = sum(value for name, value in samples.items() if name.startswith("pd_router_retries_total"))
        print(f"funnel: {stages}; turns tried again: {retried:.0f}")
        print(
            f"handles issued {verdict['issued']}, sent to an engine {verdict['sent']}, "
            f"breaches {len(verdict['violations'])}"
        )
        print(f"{len(out.problems)} problems")


async def main(arguments: argparse.Namespace) -> int:
    """0 when everything was as it must be."""
    flags = dict(FLAGS)
    store = RedisServer() if arguments.store == "valkey" else None
    secret = tempfile.NamedTemporaryFile("w", prefix="pd-key-")  # noqa: SIM115 - lives as long as the router
    if store is not None:
        secret.write(secrets.token_hex(32))
        secret.flush()
        flags |= {"--handle-store": "valkey", "--valkey-url": store.url, "--handle-key-file": secret.name}
        await store.start()
    fleet = ProcessFleet(arguments.prefills, arguments.decodes, flags=flags, engine_flags=ENGINE_FLAGS)
    try:
        await fleet.start()
        chaos = Chaos(fleet, store, arguments.seed, arguments.minutes * 60, arguments.conversations)
        await chaos.run()
        await chaos.report()
        if chaos.out.problems and arguments.logs:
            await asyncio.to_thread(Path(arguments.logs).write_text, fleet.router.log)
    finally:
        await fleet.stop()
        if store is not None:
            store.close()
        secret.close()
    return 1 if chaos.out.problems else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=32, help="at one time")
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--decodes", type=int, default=3)
    parser.add_argument("--store", choices=("memory", "valkey"), default="memory", help="where handles are kept")
    parser.add_argument("--logs", metavar="PATH", help="where to put the router's log when there were problems")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse())))
