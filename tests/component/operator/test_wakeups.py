"""The queue between events and workers, on a clock that only the test moves."""

from __future__ import annotations

import asyncio

import pytest

from pd_operator.shell.wakeups import LONGEST_DELAY, Key, Wakeups

A, B = Key("n", "a"), Key("n", "b")


class Clock:
    """Seconds, moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wakeups(clock: Clock) -> Wakeups:
    return Wakeups(clock, jitter=lambda: 0.5)


async def test_many_wake_ups_are_one_reconcile(wakeups: Wakeups) -> None:
    for _ in range(5):
        wakeups.wake(A)
    assert await wakeups.next() == A
    wakeups.done(A)
    assert len(wakeups) == 0


async def test_a_wake_up_during_a_reconcile_makes_one_more_afterwards(wakeups: Wakeups) -> None:
    wakeups.wake(A)
    assert await wakeups.next() == A
    for _ in range(3):
        wakeups.wake(A)
    wakeups.wake(B)
    assert await wakeups.next() == B, "A is held and must not be given to a second worker"
    wakeups.done(A)
    assert await wakeups.next() == A
    wakeups.done(A)
    wakeups.done(B)
    assert len(wakeups) == 0


async def test_a_waiting_worker_gets_what_comes(wakeups: Wakeups) -> None:
    workers = [asyncio.create_task(wakeups.next()) for _ in range(2)]
    await asyncio.sleep(0)
    wakeups.wake(A)
    wakeups.wake(B)
    assert set(await asyncio.gather(*workers)) == {A, B}


async def test_failures_come_back_ever_later_and_success_forgets_them(wakeups: Wakeups, clock: Clock) -> None:
    delays = []
    wakeups.wake(A)
    for _ in range(12):
        assert await wakeups.next() == A
        delays.append(wakeups.failed(A))
        clock.now += delays[-1]
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[-1] == LONGEST_DELAY
    await wakeups.next()
    wakeups.done(A)
    wakeups.wake(A)
    await wakeups.next()
    assert wakeups.failed(A) == 1.0


async def test_progress_keeps_the_delay_short(wakeups: Wakeups, clock: Clock) -> None:
    wakeups.wake(A)
    for progress, expected in ((False, 1.0), (False, 2.0), (True, 1.0), (True, 1.0), (False, 2.0)):
        await wakeups.next()
        assert wakeups.failed(A, progress=progress) == expected
        clock.now += expected


async def test_an_event_ends_a_back_off(wakeups: Wakeups, clock: Clock) -> None:
    wakeups.wake(A)
    await wakeups.next()
    wakeups.failed(A)
    wakeups.wake(A)
    assert await asyncio.wait_for(wakeups.next(), 5) == A


async def test_an_event_does_not_undercut_retry_after(wakeups: Wakeups, clock: Clock) -> None:
    wakeups.wake(A)
    await wakeups.next()
    assert wakeups.failed(A, retry_after=30.0) == 30.0
    wakeups.wake(A)
    clock.now += 29.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.next(), 0.05)
    clock.now += 1.0
    assert await asyncio.wait_for(wakeups.next(), 5) == A


async def test_a_failing_object_with_events_does_not_spin(wakeups: Wakeups, clock: Clock) -> None:
    wakeups.wake(A)
    await wakeups.next()
    wakeups.wake(A)
    assert wakeups.failed(A) == 1.0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.next(), 0.05)


async def test_what_waits_is_known(wakeups: Wakeups, clock: Clock) -> None:
    assert wakeups.overdue() == 0.0
    wakeups.wake(A)
    clock.now += 7.0
    assert wakeups.overdue() == 7.0
    wakeups.forget(A)
    assert (wakeups.overdue(), len(wakeups)) == (0.0, 0)
