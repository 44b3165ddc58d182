"""Which port each local process gets.

A port that was asked for is used or refused by name; every other one is looked for upwards from the documented
defaults, which stay below the range that the kernel hands out to outgoing connections: an engine binds its ports many
seconds after they were chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

ROUTER_PORT: Final = 8000
ADMIN_PORT: Final = 9000
PREFILL_PORT: Final = 8100
DECODE_PORT: Final = 8200
SIDE_CHANNEL_PORT: Final = 5600
ROLE_STRIDE: Final = 100
"""With a base port: prefill from base, decode from base + 100, side channels from base + 200."""
SEARCH_LENGTH: Final = 2000
MAX_PORT: Final = 65535

Claim = Callable[[int], bool]
"""Takes a port for this run. False when somebody has it; a claimed port stays claimed."""


class PortError(ValueError):
    """Ports that can't be had; one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


@dataclass(frozen=True, slots=True)
class PortWishes:
    """What the user fixed; None means any free port."""

    router: int | None = None
    admin: int | None = None
    engine_base: int | None = None


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """One engine's ports."""

    http: int
    side_channel: int


@dataclass(frozen=True, slots=True)
class PortPlan:
    """All ports of one local deployment; no port stands in it twice."""

    router: int
    admin: int
    prefill: tuple[EnginePorts, ...]
    decode: tuple[EnginePorts, ...]


def plan_ports(wishes: PortWishes, prefill: int, decode: int, claim: Claim) -> PortPlan:
    """Choose a port for everything.

    Args:
        wishes: ports that the user fixed.
        prefill: number of prefill engines.
        decode: number of decode engines.
        claim: takes a port, or says that somebody has it.

    Raises:
        PortError: with every port that was asked for and is taken or out of range, by its name.
    """
    chooser = _Chooser(claim)
    base = wishes.engine_base
    if base is not None and max(prefill, decode) > ROLE_STRIDE:
        raise PortError([f"a base port leaves room for {ROLE_STRIDE} engines of a role"])
    # Fixed ports first: a searched one must never take a port that is asked for further down.
    router = chooser.fixed("router", wishes.router)
    admin = chooser.fixed("router's admin", wishes.admin)
    http: dict[str, list[int]] = {"prefill": [], "decode": []}
    side: dict[str, list[int]] = {"prefill": [], "decode": []}
    for offset, (role, count) in enumerate((("prefill", prefill), ("decode", decode))):
        for index in range(count):
            if base is not None:
                name = f"{role}-{index}"
                side_at = base + 2 * ROLE_STRIDE + (prefill if role == "decode" else 0) + index
                http[role].append(chooser.fixed(name, base + offset * ROLE_STRIDE + index) or 0)
                side[role].append(chooser.fixed(f"{name}'s side channel", side_at) or 0)
    chooser.raise_problems()
    if base is None:
        for role, first, count in (("prefill", PREFILL_PORT, prefill), ("decode", DECODE_PORT, decode)):
            http[role] = [chooser.searched(role, first) for _ in range(count)]
            side[role] = [chooser.searched(f"{role} side channel", SIDE_CHANNEL_PORT) for _ in range(count)]
    return PortPlan(
        router=router or chooser.searched("router", ROUTER_PORT),
        admin=admin or chooser.searched("router's admin", ADMIN_PORT),
        prefill=tuple(map(EnginePorts, http["prefill"], side["prefill"])),
        decode=tuple(map(EnginePorts, http["decode"], side["decode"])),
    )


class _Chooser:
    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._taken: dict[int, str] = {}
        self._problems: list[str] = []

    def fixed(self, name: str, port: int | None) -> int | None:
        if port is None:
            return None
        if not 1 <= port <= MAX_PORT:
            self._problems.append(f"port {port} for the {name} is not between 1 and {MAX_PORT}")
        elif port in self._taken:
            self._problems.append(f"port {port} is asked for twice: {self._taken[port]} and {name}")
        elif not self._claim(port):
            self._problems.append(f"port {port} for the {name} is taken; give another one, or none to have one chosen")
        else:
            self._taken[port] = name
        return port

    def searched(self, name: str, first: int) -> int:
        for port in range(first, min(first + SEARCH_LENGTH, MAX_PORT + 1)):
            if port not in self._taken and self._claim(port):
                self._taken[port] = name
                return port
        raise PortError([f"no free port from {first} to {first + SEARCH_LENGTH - 1} for the {name}"])

    def raise_problems(self) -> None:
        if self._problems:
            raise PortError(self._problems)
