"""A leg is its engine's trial from the moment it is planned until its verdict, or until its client left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pd_router.core.breaker import FAILURES_TO_OPEN, OPEN_SECONDS, Breaker
from pd_router.core.errors import internal
from pd_router.core.pairs import Direction, Pair, Pairs
from pd_router.shell.exchange import Failure
from pd_router.shell.health import LegWatch, watch
from pd_router.shell.legs import LegFailed

PAIR = Pair("p", "d", Direction.HANDOFF)


class Scene:
    """A decode engine and a pair whose time of being open is over."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pairs, self.breaker = Pairs(OPEN_SECONDS), Breaker()
        for _ in range(FAILURES_TO_OPEN):
            self.breaker.failed(0.0)
            self.pairs.failed(PAIR, 0.0)
        self.now = OPEN_SECONDS

    def plan(self) -> LegWatch:
        member = cast(Any, SimpleNamespace(breaker=self.breaker))
        return watch(member, PAIR, (), self.pairs, lambda: self.now)

    @property
    def free(self) -> tuple[bool, bool]:
        """Whether the engine, and the pair, may be tried."""
        return self.breaker.allows(self.now), not self.pairs.blocked(Direction.HANDOFF, self.now)


def failed(reason: str, engine_fault: bool) -> LegFailed:
    return LegFailed("decode", reason, internal(), engine_fault=engine_fault)


def test_a_plan_is_the_trial() -> None:
    scene = Scene()
    assert scene.free == (True, True)
    scene.plan()
    assert scene.free == (False, False)


@pytest.mark.parametrize(
    "end",
    [
        LegWatch.abandoned,
        LegWatch.let_go,
        lambda leg: leg.failed(failed(Failure.ABORTED.value, False)),
    ],
    ids=["abandoned", "let go", "given up"],
)
def test_without_a_verdict_there_is_room_at_once(end: Any) -> None:
    scene = Scene()
    end(scene.plan())
    assert scene.free == (True, True)


def test_an_engine_that_offers_no_blocks_frees_the_pair_only() -> None:
    scene = Scene()
    leg = scene.plan()
    leg.moves_nothing()
    assert scene.free == (False, True)
    leg.succeeded()
    assert scene.breaker.state(scene.now) == "closed"
    assert [pair for pair, _ in scene.pairs.tripped()] == [PAIR]


def test_who_was_let_go_does_not_free_the_next_trial() -> None:
    scene = Scene()
    first = scene.plan()
    first.let_go()
    scene.plan()
    first.abandoned()
    assert scene.free == (False, False)


def test_after_a_verdict_it_is_not_abandoned() -> None:
    scene = Scene()
    first = scene.plan()
    first.succeeded()
    assert scene.free == (True, True)
    for _ in range(FAILURES_TO_OPEN):
        scene.breaker.failed(scene.now)
    scene.now += 100.0
    second = scene.plan()
    first.abandoned()
    assert not scene.free[0]
    second.failed(failed("closed", True))
    assert scene.breaker.state(scene.now) == "open"
