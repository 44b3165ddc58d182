"""``python -m support.fake_engine --role prefill --port 8100 --role decode --port 8200``: engines in one process.

Engines of one process can pull from each other; give ``--role`` and ``--port`` once per engine. Violations of the
engine contract are printed to stderr as they happen, and the exit status is 1 if there were any.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from support.fake_engine.answers import AnswerStyle
from support.fake_engine.behaviour import Behaviour
from support.fake_engine.connector import ConnectorConfig
from support.fake_engine.engine import EngineConfig, FakeEngine
from support.fake_engine.fabric import Fabric


class _LoudFabric(Fabric):
    def violate(self, who: str, what: str) -> None:
        super().violate(who, what)
        print(f"VIOLATION {who}: {what}", file=sys.stderr, flush=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fake_engine", description=__doc__)
    parser.add_argument("--role", action="append", choices=("prefill", "decode"), required=True)
    parser.add_argument("--port", action="append", type=int, required=True)
    parser.add_argument("--model", default="tiny", help="served name")
    parser.add_argument("--mode", choices=("stock", "verified"), default="verified", help="connector to imitate")
    parser.add_argument("--no-bidirectional", action="store_true")
    parser.add_argument("--blocks", type=int, default=1 << 18)
    parser.add_argument("--ttl", type=float, default=480.0, help="decode blocks' lease in seconds")
    parser.add_argument("--retention", choices=("Pinned", "Unpinned", "Leased"), default="Pinned")
    parser.add_argument("--lease-seconds", type=int, default=60, help="of a lease that nobody prolongs")
    parser.add_argument("--words", type=int, default=4, help="words per answer")
    parser.add_argument("--event-delay", type=float, default=0.0, help="seconds between stream events")
    arguments = parser.parse_args()
    if len(arguments.role) != len(arguments.port):
        parser.error("give --role and --port once per engine")
    return arguments


async def _serve(arguments: argparse.Namespace) -> int:
    fabric = _LoudFabric()
    behaviour = Behaviour(style=AnswerStyle(words=arguments.words), event_delay=arguments.event_delay)
    engines = []
    for role, port in zip(arguments.role, arguments.port, strict=True):
        connector = ConnectorConfig(
            role,
            mode=arguments.mode,
            bidirectional=not arguments.no_bidirectional,
            blocks=arguments.blocks,
            decoder_ttl=arguments.ttl,
            retention=arguments.retention,
            lease_seconds=arguments.lease_seconds,
        )
        engine = FakeEngine(EngineConfig(connector, models=(arguments.model,), port=port), fabric)
        engine.default = behaviour
        await engine.start()
        print(f"{engine.name} ({role}) on {engine.url}", flush=True)
        engines.append(engine)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    for engine in engines:
        await engine.kill()
    return 1 if fabric.violations else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(_serve(_parse_arguments())))
