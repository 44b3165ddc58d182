"""The demo's ground in a cluster: helm installs the operator, kubectl applies the example, one patch turns reuse off.

The legs share one PDDeployment; between them only `spec.kvTransfer.bidirectional` is changed, as a user would.
Everything goes through `kubectl` and `helm`, and turns go through the router's Service, so this must run in the
cluster's network.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pd_operator.core.choices import Switch
from pd_wire import names
from pdctl.core.cluster.images import OPERATOR_IMAGE
from pdctl.core.cluster.sight import ENGINE_PORT, ROUTER_ADMIN_PORT, Sight, pods_of, read_sight
from pdctl.core.commands import Urls
from pdctl.core.measurements import Leg
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.console import Console

SYSTEM_NAMESPACE: Final = "pd-system"
RELEASE: Final = "pd-operator"
READY_SECONDS: Final = 900.0
LOOK_SECONDS: Final = 2.0
_SWITCH: Final = {Leg.ON: Switch.ENABLED, Leg.OFF: Switch.DISABLED}


class ClusterGround:
    """``name`` and ``model`` are what the example's file says: the object's name, and the name that clients ask for."""

    legs = (Leg.ON, Leg.OFF)

    def __init__(self, chart: Path, example: Path, name: str, model: str, logs: Path, console: Console) -> None:
        self._chart = chart
        self._example = example
        self._name = name
        self._model = model
        self._logs = logs
        self._console = console
        self._leg: Leg | None = None

    async def install(self) -> None:
        """Install the operator and wait until it runs. Raises ClusterError."""
        self._console.progress("helm install: the operator")
        registry, tag = OPERATOR_IMAGE.partition("/")[0], OPERATOR_IMAGE.rpartition(":")[2]
        values = {
            "image.registry": registry,
            "image.tag": tag,
            "children.imagePullPolicy": "IfNotPresent",
            "operator.routerPollSeconds": "2",  # nobody wants to wait half a minute for a condition here
        }
        settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        await _run(
            *("helm", "install", RELEASE, str(self._chart), "--namespace", SYSTEM_NAMESPACE, "--create-namespace"),
            *(*settings, "--wait", "--timeout", "5m"),
        )
        self._console.settle()
        self._console.say(f"helm install {RELEASE}: the operator runs in namespace {SYSTEM_NAMESPACE}")

    async def start(self, leg: Leg) -> Urls:
        """Apply the example, or patch its switch, and wait until exactly that is served. Raises ClusterError."""
        wanted = _SWITCH[leg]
        if self._leg is None:
            self._console.say(f"kubectl apply -f {self._example}")
            await _run("kubectl", "apply", "-f", str(self._example))
        self._leg = leg
        patch = {"spec": {"kvTransfer": {"bidirectional": wanted.value}}}
        await _run("kubectl", "patch", "pdd", self._name, "--type", "merge", "-p", json.dumps(patch))
        self._console.say(f"kubectl patch pdd {self._name}: kvTransfer.bidirectional {wanted.value}")
        await self._until_ready()
        pods = await self._pods()
        service = await _json("get", "service", f"{self._name}-router")
        (router, *_) = pods_of(pods, "router")
        return Urls(
            router=f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}",
            admin=f"http://{router['status']['podIP']}:{ROUTER_ADMIN_PORT}",
            prefill=tuple(_engine_url(pod) for pod in pods_of(pods, names.ROLE_PREFILL)),
            decode=tuple(_engine_url(pod) for pod in pods_of(pods, names.ROLE_DECODE)),
            model=self._model,
        )

    async def failure(self) -> Exception:
        """A container that ended by itself."""
        while True:
            sight = await self._look()
            if sight.deaths:
                return ClusterError(f"while conversations were played: {'; '.join(sight.deaths)}")
            await asyncio.sleep(2 * LOOK_SECONDS)

    async def stop(self) -> None:
        """Save the pods' logs. Nothing is stopped: the next leg changes the object, and the cluster ends everything."""
        if self._leg is None:
            return
        folder = self._logs / self._leg.value
        folder.mkdir(parents=True, exist_ok=True)
        for pod in await self._pods():
            name = pod["metadata"]["name"]
            # A pod whose container hasn't started has none.
            with suppress(ClusterError):
                (folder / f"{name}.log").write_text(await _run("kubectl", "logs", name, "--all-containers", "--prefix"))

    async def show(self) -> str:
        """What `kubectl get pdd,pods` prints."""
        return await _run("kubectl", "get", "pdd,pods", "-o", "wide")

    async def _until_ready(self) -> None:
        begun = time.monotonic()
        while True:
            sight = await self._look()
            seconds = time.monotonic() - begun
            if sight.ready:
                self._console.settle()
                self._console.say(f"{self._name} is ready after {seconds:.0f} s")
                return
            if sight.deaths or seconds > READY_SECONDS:
                told = "; ".join(sight.deaths) or f"not ready after {seconds:.0f} s, waiting for {sight.waiting_for}"
                raise ClusterError(f"{told}\n{await self.show()}")
            self._console.progress(f"waiting for {sight.waiting_for} ({seconds:.0f} s)")
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> Sight:
        pdd, pods = await asyncio.gather(_json("get", "pdd", self._name), self._pods())
        return read_sight(pdd, pods)

    async def _pods(self) -> list[dict[str, Any]]:
        found = await _json("get", "pods", "-l", f"{names.LABEL_DEPLOYMENT}={self._name}")
        items: list[dict[str, Any]] = found["items"]
        return items


def _engine_url(pod: Any) -> str:
    return f"http://{pod['status']['podIP']}:{ENGINE_PORT}"


async def _json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await _run("kubectl", *arguments, "-o", "json"))
    return found


async def _run(*argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if process.returncode:
        words = " ".join(argv[:3])
        raise ClusterError(f"{words} … ended with {process.returncode}: {err.decode(errors='replace').strip()}")
    return out.decode()
