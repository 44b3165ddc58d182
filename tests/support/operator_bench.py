"""The operator's own objects over a cluster in memory, with a clock that only tests move."""

from __future__ import annotations

from typing import Any

from pd_operator.core.observed_kinds import Ref
from pd_operator.shell.api import ClusterApi
from pd_operator.shell.metrics import Metrics
from pd_operator.shell.options import Options
from pd_operator.shell.run import Operator
from support.memory_cluster import MemoryCluster
from support.pddeployments import edited, smallest

QWEN = Ref("PDDeployment", "models", "qwen")


class Bench:
    """A cluster and the operators that serve it."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.time = 1000.0

    async def operator(self, api: ClusterApi | None = None, **options: Any) -> Operator:
        """A started operator process."""
        defaults: dict[str, Any] = {"router_image": "r:1", "connector_image": "c:1"}
        made = Operator(Options(**{**defaults, **options}), api or self.cluster, Metrics(), lambda: self.time)
        self.cluster.listeners.append(made.saw)
        await made.look_at_everything()
        return made

    def stop(self, operator: Operator) -> None:
        """Its watches end, as with the process."""
        self.cluster.listeners.remove(operator.saw)

    async def settle(self, *operators: Operator, rounds: int = 500) -> None:
        """Work until nobody has anything to do; time passes as needed."""
        for _ in range(rounds):
            busy = [operator for operator in operators if len(operator.wakeups)]
            if not busy:
                return
            self.time += 400.0
            for operator in busy:
                await operator.work_once()
        raise AssertionError("the operators never come to rest")

    async def assert_another_look_writes_nothing(self, operator: Operator) -> None:
        """What stands is what is wanted."""
        writes = len(self.cluster.writes)
        await operator.resync_once()
        await self.settle(operator)
        assert len(self.cluster.writes) == writes

    async def work(self, operator: Operator, times: int = 1) -> None:
        """A number of reconciles, with time in between for every delay."""
        for _ in range(times):
            self.time += 400.0
            await operator.work_once()

    def create(self, *edits: tuple[str, Any], name: str = "qwen") -> dict[str, Any]:
        """A user applies a PDDeployment."""
        base = edited(smallest(), ("metadata.namespace", "models"), ("metadata.name", name))
        return self.cluster.put(edited(base, ("spec.engine.image", "vllm:v0.32.0"), *edits))

    def change(self, *edits: tuple[str, Any]) -> None:
        """A user edits the PDDeployment."""
        raw = {key: value for key, value in self.cluster.objects[QWEN].items() if key != "status"}
        self.cluster.put(edited(raw, *edits))

    def condition(self, kind: str, name: str = "qwen") -> dict[str, Any]:
        """A condition of the PDDeployment."""
        status = self.cluster.objects[Ref("PDDeployment", "models", name)]["status"]
        return next(one for one in status["conditions"] if one["type"] == kind)

    def serve_all(self) -> None:
        """Every workload has its pods ready."""
        for ref in list(self.cluster.objects):
            if ref.kind in ("StatefulSet", "Deployment"):
                self.cluster.serve(ref)
