"""Which cores and accelerators each local engine gets, or why this machine can't run the deployment.

Separate from the ports because it answers a different question: two CPU engines that share their cores' threads slow
each other down many times over, and an engine that finds no EFA device must not start on TCP and look healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_operator.core.choices import Backend, Device, NodeProfile, Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.profiles import backend_of, profile_of
from pd_operator.core.render_engine import NOT_BOUND


class PlacementError(ValueError):
    """This machine lacks what the deployment asks for; the message says what and what to change."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine has.

    ``gpus`` are CUDA device ids in the notation of CUDA_VISIBLE_DEVICES; ``efa_devices`` counts RDMA devices.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    efa_devices: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """One engine's share. ``cores`` is vLLM's notation (`NOT_BOUND` where cores are too few), None on an accelerator;
    ``gpus`` may be empty."""

    role: Role
    index: int
    cores: str | None
    gpus: tuple[str, ...]


def plan_seats(deployment: PDDeployment, machine: Machine) -> tuple[Seat, ...]:
    """A share of the machine for every engine, prefill first.

    Raises:
        PlacementError: the machine can't run the deployment.
    """
    wanted = [(role, index) for role in Role for index in range(deployment.role(role).replicas)]
    for role in Role:
        if deployment.role(role).replicas == 0:
            raise PlacementError(f"spec.{role.value}.replicas is 0: nothing could be served; set it to 1 or more")
    if profile_of(deployment.spec).device is Device.CPU:
        shares = split_cores(machine.cores, len(wanted))
        return tuple(Seat(role, index, cores, ()) for (role, index), cores in zip(wanted, shares, strict=True))
    _refuse_without_devices(deployment, machine)
    seats, first = [], 0
    for role, index in wanted:
        size = deployment.role(role).tensor_parallel_size
        seats.append(Seat(role, index, None, machine.gpus[first : first + size]))
        first += size
    return tuple(seats)


def split_cores(cores: Sequence[int], engines: int) -> list[str]:
    """Divide cores into one list per engine, in the notation "0,1,2".

    With fewer cores than engines nothing is bound: of two engines bound to one core, one that spins can keep the other
    from it for half a minute while another core is idle.
    """
    if len(cores) < engines:
        return [NOT_BOUND] * engines
    shares, first = [], 0
    for index in range(engines):
        size = len(cores) // engines + (1 if index < len(cores) % engines else 0)
        shares.append(",".join(str(core) for core in cores[first : first + size]))
        first += size
    return shares


def _refuse_without_devices(deployment: PDDeployment, machine: Machine) -> None:
    spec = deployment.spec
    lacking = []
    needed = sum(deployment.role(role).replicas * deployment.role(role).tensor_parallel_size for role in Role)
    if len(machine.gpus) < needed:
        lacking.append(f"{needed} NVIDIA GPUs (this machine shows {len(machine.gpus)})")
    if backend_of(spec) is Backend.LIBFABRIC and machine.efa_devices == 0:
        lacking.append("EFA devices (there are none in /sys/class/infiniband)")
    if not lacking:
        return
    what = spec.node_profile.value
    advice = "run it on such machines, or try the same object here with --set spec.nodeProfile=CPU and a small model"
    if spec.node_profile is NodeProfile.P5EN_EFA:
        advice += " (--set spec.prefill.tensorParallelSize=1 --set spec.decode.tensorParallelSize=1)"
    raise PlacementError(f"nodeProfile {what} needs {' and '.join(lacking)}: {advice}")
