"""The routers that are compared: how each is started, and what may be expected of it.

Separate so that a peer's command line, the thing a reader wants to check for fairness, is in one place. Each router
gets a pair of canned engines of its own. A peer's engines answer as vLLM's stock connector does; ours as our connector
does, whose handle is longer by the proof, because that is what each of them meets in a deployment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perf.provision import Peers

OURS: Final = "pd-router"
IN_PYTHON: Final = "pd-router-python"
WORKERS: Final = "pd-router-workers"
VLLM_ROUTER: Final = "vllm-router"
VLLM_ROUTER_LEAN: Final = "vllm-router-lean"
EXAMPLE_PROXY: Final = "example-proxy"
FLOOR: Final = "floor"

_HERE: Final = Path(__file__).parent
_ROUTER_SOURCES: Final = ":".join(str(_HERE.parents[1] / part) for part in ("router", "connector"))


@dataclass(frozen=True, slots=True)
class Place:
    """Ports on the loopback address."""

    listen: int
    admin: int
    prefill: int
    decode: int

    @property
    def url(self) -> str:
        """Where the router answers."""
        return f"http://127.0.0.1:{self.listen}"

    @property
    def prefill_url(self) -> str:
        """Where its prefill engine answers."""
        return f"http://127.0.0.1:{self.prefill}"

    @property
    def decode_url(self) -> str:
        """Where its decode engine answers."""
        return f"http://127.0.0.1:{self.decode}"


@dataclass(frozen=True, slots=True)
class Contender:
    """One router under test."""

    name: str
    title: str
    connector: str
    """Whose handles its engines return: ``verified`` (ours) or ``stock``."""
    reuses: bool
    """Attaches the decode engine's handle to the conversation's next prefill."""
    hides_handles: bool
    """Lets no handle through to the client."""
    command: Callable[[Place, Peers], list[str]]
    environment: dict[str, str]


def _ours(place: Place, _: Peers) -> list[str]:
    return [
        *(sys.executable, "-m", "pd_router"),
        *("--listen", f"127.0.0.1:{place.listen}", "--admin", f"127.0.0.1:{place.admin}"),
        *("--prefill", place.prefill_url, "--decode", place.decode_url),
        *("--model", "m", "--anonymous", "reuse"),
    ]


def _in_python(place: Place, peers: Peers) -> list[str]:
    return [*_ours(place, peers), "--native", "off"]


def _workers(place: Place, peers: Peers) -> list[str]:
    return [*_ours(place, peers), "--workers", "2"]


def _vllm_router(place: Place, peers: Peers) -> list[str]:
    return [
        *(str(peers.vllm_router), "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", str(place.listen)),
        *("--prefill", place.prefill_url, "--decode", place.decode_url),
        *("--prometheus-port", str(place.admin), "--worker-startup-check-interval", "1"),
    ]


def _vllm_router_lean(place: Place, peers: Peers) -> list[str]:
    return [*_vllm_router(place, peers), "--policy", "round_robin", "--log-level", "error"]


def _example_proxy(place: Place, peers: Peers) -> list[str]:
    return [
        *(str(peers.python), str(peers.example_proxy), "--host", "127.0.0.1", "--port", str(place.listen)),
        *("--prefiller-host", "127.0.0.1", "--prefiller-port", str(place.prefill)),
        *("--decoder-host", "127.0.0.1", "--decoder-port", str(place.decode)),
    ]


def _floor(place: Place, _: Peers) -> list[str]:
    ports = (place.listen, place.prefill, place.decode)
    return [sys.executable, str(_HERE / "floor.py"), *(str(port) for port in ports)]


CONTENDERS: Final = (
    Contender(OURS, "pd-router (ours)", "verified", True, True, _ours, {"PYTHONPATH": _ROUTER_SOURCES}),
    # What the compiled part gains.
    Contender(IN_PYTHON, "pd-router, all Python", "verified", True, True, _in_python, {"PYTHONPATH": _ROUTER_SOURCES}),
    # What the way to a shared store costs; on one core, so that it says nothing of how much more two can do.
    Contender(WORKERS, "pd-router, two workers", "verified", True, True, _workers, {"PYTHONPATH": _ROUTER_SOURCES}),
    # Its default policy asks both engines for the prompt's token ids before each turn.
    Contender(VLLM_ROUTER, "vllm-router, as it comes", "stock", False, False, _vllm_router, {}),
    # The cheapest way to run it that we know of: no prompt inspection, no request logs.
    Contender(VLLM_ROUTER_LEAN, "vllm-router, round robin", "stock", False, False, _vllm_router_lean, {}),
    Contender(EXAMPLE_PROXY, "vLLM's example proxy", "stock", True, False, _example_proxy, {}),
    Contender(FLOOR, "floor: forwards, no checks", "stock", True, True, _floor, {}),
)
