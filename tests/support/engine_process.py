"""One fake engine as a process of its own, on loopback: what can be killed, stopped and started again.

``python -m support.engine_process --role decode --name decode-1 --port 8200 --side-port 9200 --judge http://…``

Its blocks are read over its side channel, and judgements are the judge's, as for engines in pods. The side channel also
takes orders: ``POST /order`` plans faults and delays, ``GET /state`` tells what runs and what is retained.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from typing import Any

from aiohttp import web

from support.cluster_serving_fabric import JudgeClient, NetworkFabric, side_channel
from support.fake_engine import AnswerStyle, Behaviour, ConnectorConfig, EngineConfig, FakeEngine, Fault, Kind, Point

STYLE = AnswerStyle(words=12)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments. Times in seconds."""
    parser = argparse.ArgumentParser(prog="engine_process", description=__doc__)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--side-port", type=int, required=True)
    parser.add_argument("--judge", required=True)
    parser.add_argument("--ttl", type=float, default=480.0)
    parser.add_argument("--lease", type=float, default=30.0)
    parser.add_argument("--blocks", type=int, default=1 << 16)
    parser.add_argument("--event-delay", type=float, default=0.0)
    return parser.parse_args(argv)


def orders(engine: FakeEngine, usual: Behaviour) -> list[web.RouteDef]:
    """The routes by which a test moves the engine."""

    async def order(request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        if "fault" in asked:
            fault = Fault(Kind(asked["fault"]), Point(asked["at"]), int(asked.get("status", 500)))
            engine.next(Behaviour(fault=fault, style=STYLE), times=asked.get("times", 1))
        if "event_delay" in asked:
            engine.default = Behaviour(style=STYLE, event_delay=asked["event_delay"])
        if "pull_delay" in asked:
            engine.connector.pull_delay = asked["pull_delay"]
        if "cut_off" in asked:
            engine.connector.cut_off.update(asked["cut_off"])
        if asked.get("well"):
            engine.plan.clear()
            engine.default = usual
            engine.connector.cut_off.clear()
            engine.connector.pull_delay = 0.0
        return web.Response()

    async def state(_request: web.Request) -> web.Response:
        return web.json_response(
            {
                "engine_id": engine.engine_id,
                "running": sum(record.fate == "running" for record in engine.generates),
                "requests": len(engine.generates),
                "retained": len(engine.connector.retained()),
                "used_blocks": engine.used_blocks,
                "counters": dict(engine.connector.counters),
            }
        )

    return [web.post("/order", order), web.get("/state", state)]


async def serve(arguments: argparse.Namespace) -> None:
    """Run until SIGTERM."""
    judge = JudgeClient(arguments.judge)
    judge.wait()
    fabric = NetworkFabric(judge)
    connector = ConnectorConfig(
        arguments.role, decoder_ttl=arguments.ttl, lease=arguments.lease, blocks=arguments.blocks
    )
    side = ("127.0.0.1", arguments.side_port)
    engine = FakeEngine(EngineConfig(connector, port=arguments.port, name=arguments.name, side_channel=side), fabric)
    usual = engine.default = Behaviour(style=STYLE, event_delay=arguments.event_delay)
    app = side_channel(engine.connector)
    app.router.add_routes(orders(engine, usual))
    peers = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await peers.setup()
    await web.TCPSite(peers, *side).start()
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await engine.start()
    await ending.wait()
    await engine.kill()
    await peers.cleanup()
    await fabric.close()


if __name__ == "__main__":
    asyncio.run(serve(parse(sys.argv[1:])))
