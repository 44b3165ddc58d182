"""Deployment + ports + seats → the processes to start here, with their interpreters filled in.

The arguments come from the operator's renderers, the same as in a pod; this module adds what only this machine knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pd_operator.core.choices import Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_engine import NOT_BOUND, EngineEndpoint, render_engine
from pd_operator.core.render_router import render_router
from pd_wire import names
from pdctl.core.placement import Seat
from pdctl.core.ports import EnginePorts, PortPlan

LOOPBACK: Final = "127.0.0.1"
"""Engines and their side channels stay on it; only the router may be asked to listen elsewhere."""


class Part(StrEnum):
    """What a process of a deployment is."""

    PREFILL = names.ROLE_PREFILL
    DECODE = names.ROLE_DECODE
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Programs:
    """The interpreters on this machine. ``vllm`` is how `vllm` is started there, as a list of words."""

    engine_python: str
    router_python: str
    vllm: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One process to start. ``env`` is what to add to the caller's environment; ``health`` answers 200 when ready."""

    part: Part
    index: int
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    health: str

    @property
    def name(self) -> str:
        """`prefill-0`, `decode-1`, `router`."""
        return str(self.part) if self.part is Part.ROUTER else f"{self.part}-{self.index}"


@dataclass(frozen=True, slots=True)
class Urls:
    """Base URLs without a slash at the end, and the name that clients send as `model`."""

    router: str
    admin: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    model: str


def plan_commands(
    deployment: PDDeployment, seats: Sequence[Seat], ports: PortPlan, host: str, programs: Programs
) -> tuple[tuple[Command, ...], Urls]:
    """Every process, engines first, and where to reach them.

    Args:
        deployment: a parsed object.
        seats: one per engine, from `placement.plan_seats`.
        ports: from `ports.plan_ports` for the same numbers of engines.
        host: where the router listens.
        programs: the interpreters.
    """
    engines = [_engine(deployment, seat, _ports_of(ports, seat), programs) for seat in seats]
    prefill = tuple(engine.url for engine in engines if engine.part is Part.PREFILL)
    decode = tuple(engine.url for engine in engines if engine.part is Part.DECODE)
    reach = LOOPBACK if host in ("0.0.0.0", "::", "") else host
    admin = f"http://{LOOPBACK}:{ports.admin}"
    process = render_router(
        deployment,
        listen=f"{_in_url(host)}:{ports.router}",
        admin=f"{LOOPBACK}:{ports.admin}",
        prefill_urls=prefill,
        decode_urls=decode,
    )
    argv = (programs.router_python, "-m", "pd_router", *process.argv[1:])
    url = f"http://{_in_url(reach)}:{ports.router}"
    router = Command(Part.ROUTER, 0, argv, {"PYTHONUNBUFFERED": "1", **process.env}, url, f"{admin}/readyz")
    return (*engines, router), Urls(url, admin, prefill, decode, deployment.spec.model.public_name)


def _engine(deployment: PDDeployment, seat: Seat, ports: EnginePorts, programs: Programs) -> Command:
    endpoint = EngineEndpoint(LOOPBACK, ports.http, LOOPBACK, ports.side_channel, seat.cores)
    process = render_engine(deployment, seat.role, endpoint)
    program = (programs.engine_python,) if process.argv[0] == "python" else programs.vllm
    env = {"PYTHONUNBUFFERED": "1", "VLLM_LOGGING_COLOR": "0", **process.env}
    if seat.cores == NOT_BOUND:
        # Each would take as many threads as there are cores.
        env = {"OMP_NUM_THREADS": "1", **env}
    if seat.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(seat.gpus)
    url = f"http://{LOOPBACK}:{ports.http}"
    part = Part.PREFILL if seat.role is Role.PREFILL else Part.DECODE
    return Command(part, seat.index, (*program, *process.argv[1:]), env, url, f"{url}/health")


def _ports_of(ports: PortPlan, seat: Seat) -> EnginePorts:
    return (ports.prefill if seat.role is Role.PREFILL else ports.decode)[seat.index]


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
