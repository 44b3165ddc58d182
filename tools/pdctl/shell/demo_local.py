"""The demo's ground on this machine: each leg is a deployment of its own, as local processes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pd_operator.core.parse import parse_deployment
from pdctl.core.commands import Urls
from pdctl.core.demo_spec import demo_document
from pdctl.core.dialogue import DialoguePlan
from pdctl.core.measurements import Leg
from pdctl.shell.console import Console
from pdctl.shell.lifecycle import StartError
from pdctl.shell.local import LocalDeployment, LocalOptions

STOP_GRACE: Final = 5.0


class LocalGround:
    """Starts everything anew for each leg, so that neither finds what the other left."""

    legs = (Leg.OFF, Leg.ON)

    def __init__(self, plan: DialoguePlan, model: Path, out: Path, engine_python: str, console: Console) -> None:
        self._plan = plan
        self._model = model
        self._out = out
        self._engine_python = engine_python
        self._console = console
        self._local: LocalDeployment | None = None

    async def start(self, leg: Leg) -> Urls:
        """Start prefill, decode and router.

        Raises:
            EnginePythonError: the interpreter lacks something.
            StartError: a process died or wasn't ready in time.
        """
        document = demo_document(str(self._model), self._plan.longest, self._plan.reply, leg is Leg.ON)
        options = LocalOptions(
            log_dir=self._out / "logs" / leg.value, engine_python=self._engine_python, stop_grace=STOP_GRACE
        )
        self._local = LocalDeployment(parse_deployment(document), options, self._console)
        self._console.say(f"reuse {leg.name}: starting prefill, decode and router")
        await self._local.check()
        await self._local.start()
        return self._local.urls

    async def failure(self) -> Exception:
        """A process that ended by itself."""
        assert self._local is not None
        dead = await self._local.wait_failure()
        return StartError(dead, f"{dead.exit} while conversations were played")

    async def stop(self) -> None:
        """Stop the leg's processes."""
        if self._local is not None:
            await self._local.stop()
