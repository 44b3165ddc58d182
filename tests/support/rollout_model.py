"""Two StatefulSets whose engines load for as long as a test likes, and the operator's decision between their steps.

The controller is written after Kubernetes' own (`updateStatefulSet`), in both of its ways: one pod after the other from
the highest index, or, since 1.37, every pod of an old template that is not available, and then up to `maxUnavailable`.
A partition always stands in the spec: without one, what is made anew would depend on the controller's own counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pd_operator.core.plan_rollout import Engine, Hold, Rollout, Side, pairs, plan_rollout


@dataclass
class ModelPod:
    """One engine: it is ready first and available later. ``rotten``: it can't start any more."""

    generation: str
    ready: bool = False
    available: bool = False
    troubled: bool = False
    rotten: bool = False

    def come_up(self) -> None:
        """Ready for long enough; what can't start is in trouble by then."""
        self.be_ready()
        self.available = self.ready

    def be_ready(self) -> None:
        """It answers, but not for long enough."""
        self.ready = self.ready or not self.rotten
        self.troubled = not self.ready

    def go_down(self) -> None:
        """It does not answer any more."""
        self.ready = self.available = False


@dataclass
class ModelSet:
    """One role's StatefulSet. ``current``: the template of pods below the partition that are made anew; ``rotten``:
    those from which no engine starts any more."""

    replicas: int
    template: str
    modern: bool = True
    partition: int = 0
    current: str = ""
    step: int = 1
    user_partition: int = 0
    pods: dict[int, ModelPod] = field(default_factory=dict)
    rotten: set[str] = field(default_factory=set)
    taken: int = 0
    """Pods that an update has replaced."""

    def __post_init__(self) -> None:
        self.current = self.current or self.template

    def engines(self) -> tuple[Engine, ...]:
        """As the operator sees them."""
        return tuple(Engine(n, pod.generation, pod.ready, pod.troubled) for n, pod in sorted(self.pods.items()))

    def side(self, wanted: int | None) -> Side:
        """As the operator sees the role."""
        available = sum(pod.available for pod in self.pods.values())
        return Side(
            self.replicas, self.engines(), available, wanted, self.template, self.partition, self.user_partition,
            self.step,
        )  # fmt: skip

    def control(self) -> None:
        """One look of its controller: pods that are missing are made, pods too many go, and then the update."""
        self.pods = {index: pod for index, pod in self.pods.items() if index < self.replicas}
        for index in range(self.replicas):
            if index not in self.pods:
                made = self.current if index < self.partition else self.template
                self.pods[index] = ModelPod(made, rotten=made in self.rotten)
        if self.modern:
            self._update_all_that_is_down()
        else:
            self._update_next()
        if all(pod.generation == self.template and pod.ready for pod in self.pods.values()):
            self.current = self.template

    def rot(self, generation: str) -> None:
        """Engines of that template run on, and start no more."""
        self.rotten.add(generation)
        for pod in self.pods.values():
            pod.rotten = pod.rotten or pod.generation == generation

    def _update_next(self) -> None:
        for index in reversed(range(self.partition, self.replicas)):
            pod = self.pods[index]
            if pod.generation != self.template:
                self._take(index)
                return
            if not pod.available:
                return

    def _update_all_that_is_down(self) -> None:
        old = [index for index in reversed(range(self.replicas)) if self.pods[index].generation != self.template]
        budget = self.step - sum(not pod.available for pod in self.pods.values())
        for index in old:
            down = not self.pods[index].available
            if index >= self.partition and (down or budget > 0):
                budget -= not down
                self._take(index)

    def _take(self, index: int) -> None:
        del self.pods[index]
        self.taken += 1


class ModelDeployment:
    """Both roles, what the spec asks for, and the writes that its operator made."""

    def __init__(self, prefill: int, decode: int, *, modern: bool = True, wanted: str = "a") -> None:
        self.generation = wanted
        self.sets = {"prefill": ModelSet(prefill, wanted, modern), "decode": ModelSet(decode, wanted, modern)}
        self.wanted: dict[str, int | None] = {"prefill": prefill, "decode": decode}
        self.writes = {"prefill": 0, "decode": 0}
        self.templates = {"prefill": 0, "decode": 0}
        self.rollout = Rollout((Hold(0), Hold(0)))

    def operate(self, roles: Iterable[str] = ("prefill", "decode")) -> None:
        """One reconcile; with one role only, it was killed after its first write."""
        prefill, decode = (one.side(self.wanted[role]) for role, one in self.sets.items())
        self.rollout = plan_rollout(self.generation, (prefill, decode))
        holds = dict(zip(self.sets, self.rollout.holds, strict=True))
        for role in roles:
            self._write(role, holds[role])

    def _write(self, role: str, hold: Hold) -> None:
        one, wanted = self.sets[role], self.wanted[role]
        replicas = one.replicas if wanted is None else wanted if hold.replicas is None else hold.replicas
        new = (self.generation, hold.partition, replicas)
        if new == (one.template, one.partition, one.replicas):
            return
        self.writes[role] += 1
        self.templates[role] += one.template != self.generation
        one.template, one.partition, one.replicas = new

    def serving(self) -> frozenset[str]:
        """Generations of which a pair can serve."""
        return pairs(
            tuple(engine for engine in one.engines() if engine.index < one.replicas) for one in self.sets.values()
        )

    def all_pods(self) -> list[ModelPod]:
        """Every engine, prefill first."""
        return [pod for one in self.sets.values() for _, pod in sorted(one.pods.items())]

    def come_up(self) -> None:
        """Everything is ready."""
        for pod in self.all_pods():
            pod.come_up()

    def start(self) -> ModelDeployment:
        """Everything exists and serves."""
        for one in self.sets.values():
            one.control()
        self.come_up()
        for one in self.sets.values():
            one.control()
        return self

    def at_rest(self) -> bool:
        """Do all pods run their own role's template?"""
        return all(
            len(one.pods) == one.replicas and {pod.generation for pod in one.pods.values()} == {one.template}
            for one in self.sets.values()
        )

    def done(self) -> bool:
        """Is everything new, and ready, and of the wanted number?"""
        return all(
            one.replicas == (one.replicas if self.wanted[role] is None else self.wanted[role])
            and one.template == self.generation
            and one.partition == one.user_partition == 0
            and len(one.pods) == one.replicas
            and all(pod.generation == self.generation and pod.available for pod in one.pods.values())
            for role, one in self.sets.items()
        )
