"""What `vllm serve …` runs in the fake engine's image: one fake engine per pod, set up by the command line that the
operator rendered and by nothing else.

It does as a real engine does: it refuses to start where the connector's plugin was not brought into the pod, takes its
side channel's address from the environment, drains on SIGTERM, and then waits with retained blocks until its shutdown
timeout is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from pd_wire import names
from support.cluster_serving_fabric import JudgeClient, NetworkFabric, side_channel
from support.fake_engine.answers import AnswerStyle
from support.fake_engine.behaviour import Behaviour
from support.fake_engine.connector import ConnectorConfig
from support.fake_engine.engine import EngineConfig, FakeEngine
from support.waiting import until

STYLE: Final = AnswerStyle(words=40)
EVENT_DELAY: Final = 0.03
"""Seconds between events: an answer takes about a second, so that every change of pods meets running answers."""

LOAD_SECONDS: Final = "FAKE_LOAD_SECONDS"
"""Variable: how long this engine takes to load its model."""

FALLBACK: Final = "FAKE_FALLBACK"
"""Variable of a decode engine: why it retains Pinned, whatever it is told."""

LEASE_API: Final = "pd_connector.shell.lease_api.LeaseApi"
PLUGIN_PATH: Final = "/opt/pd-connector"
ROLES: Final = {kv_role: role for role, kv_role in names.KV_ROLES.items()}


class NotStarted(Exception):
    """What a real engine would end on at its start."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments that matter here. Unknown ones are vLLM's own affair."""
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("positional", nargs="*")
    parser.add_argument("--model")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=65536)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--kv-transfer-config", type=json.loads, required=True)
    return parser.parse_known_args(argv)[0]


def connector_config(arguments: argparse.Namespace) -> ConnectorConfig:
    """The KV connector that the command line asks for.

    Raises:
        NotStarted: it can't be had in this pod.
    """
    transfer = arguments.kv_transfer_config
    extra = transfer["kv_connector_extra_config"]
    verified = transfer["kv_connector"] == names.CONNECTOR_CLASS
    if verified:
        import pd_connector

        if transfer["kv_connector_module_path"] != names.CONNECTOR_MODULE:
            raise NotStarted(f"no module {transfer['kv_connector_module_path']}")
        if not str(pd_connector.__file__).startswith(f"{PLUGIN_PATH}/"):
            raise NotStarted(f"the connector's plugin was not brought into this pod: {pd_connector.__file__}")
    retention = extra.get(names.RETENTION_OPTION, names.MODE_PINNED)
    if retention == names.MODE_LEASED and LEASE_API not in arguments.middleware:
        raise NotStarted("nobody could prolong or end the leases of this engine")
    fallback = os.environ.get(FALLBACK, "")
    return ConnectorConfig(
        ROLES[transfer["kv_role"]],  # type: ignore[arg-type]
        mode="verified" if verified else "stock",
        bidirectional=extra["bidirectional_kv_xfer"],
        block_tokens=arguments.block_size,
        prefix_caching=not arguments.no_enable_prefix_caching,
        decoder_ttl=float(extra.get("decoder_kv_blocks_ttl", 480)),
        lease=float(extra["kv_lease_duration"]),
        recompute_threshold=extra.get("kv_recompute_threshold", 64),
        retention=names.MODE_PINNED if fallback else retention,
        lease_seconds=extra.get(names.LEASE_SECONDS_OPTION, 60),
        lease_share=extra.get(names.LEASE_SHARE_OPTION, 0.5),
        handle_extras={names.FALLBACK_KEY: fallback} if fallback else {},
    )


async def serve(arguments: argparse.Namespace, connector: ConnectorConfig) -> None:
    """Run until SIGTERM and the end of what follows it."""
    judge = JudgeClient()
    judge.wait()
    fabric = NetworkFabric(judge)
    await asyncio.sleep(float(os.environ.get(LOAD_SECONDS, 0)))
    pod = os.environ["HOSTNAME"]
    address = os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    config = EngineConfig(
        connector,
        models=(arguments.served_model_name,),
        max_model_len=arguments.max_model_len,
        port=arguments.port,
        host=arguments.host,
        name=pod,
        side_channel=address,
    )
    engine = FakeEngine(config, fabric)
    engine.default = Behaviour(style=STYLE, event_delay=EVENT_DELAY)
    peers = web.AppRunner(side_channel(engine.connector), access_log=None, shutdown_timeout=0.1)
    await peers.setup()
    await web.TCPSite(peers, *address).start()
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    await engine.start()
    print(f"{pod}: {connector} at {address}", flush=True)
    await ending.wait()
    await _drain(engine, fabric, arguments.shutdown_timeout)
    await engine.kill()
    await peers.cleanup()
    await fabric.close()


async def _drain(engine: FakeEngine, fabric: NetworkFabric, seconds: float) -> None:
    """Running answers and retained blocks count as work; what is left after ``seconds`` is cut off."""
    late = len(engine.generates)
    with suppress(TimeoutError):
        await until(lambda: _at_rest(engine), seconds, 0.05)
    if cut := _running(engine):
        fabric.violate(engine.name, f"{cut} answer(s) cut off by the end of the shutdown timeout")
    if came := len(engine.generates) - late:
        fabric.note(f"{engine.name}: {came} request(s) came after SIGTERM")


async def _at_rest(engine: FakeEngine) -> bool:
    return not _running(engine) and not engine.connector.retained()


def _running(engine: FakeEngine) -> int:
    return sum(record.fate == "running" for record in engine.generates)


def main(argv: Sequence[str]) -> int:
    """The command. 1 = it could not start."""
    arguments = parse(argv)
    try:
        connector = connector_config(arguments)
        asyncio.run(serve(arguments, connector))
    except (NotStarted, KeyError, OSError) as error:
        print(f"engine not started: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


def right_answer(body: dict[str, Any]) -> str:
    """The text that an engine with the right KV gives to a chat body."""
    from support.fake_engine import Template, expected_answer

    return expected_answer(Template().render(body), model=body["model"], style=STYLE, body=body).content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
