"""Limits of one tenant: rate, concurrency, retained tokens; in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.core.access import tenant_limit_problems
from pd_router.core.errors import ApiError
from pd_router.core.tenant_limits import Retained, TenantLimits, TenantMeter


def refused(meter: TenantMeter, tenant: str | None, now: float) -> ApiError:
    with pytest.raises(ApiError) as caught:
        meter.enter(tenant, now)
    assert caught.value.status == 429
    return caught.value


def test_without_limits_nothing_is_kept() -> None:
    meter = TenantMeter(TenantLimits())
    assert [meter.enter(f"t{number}", 0.0) for number in range(5)] == [None] * 5
    assert len(meter) == 0


def test_a_rate_with_its_burst() -> None:
    meter = TenantMeter(TenantLimits(rate=0.5, burst=3))
    for _ in range(3):
        meter.leave(meter.enter("a", 10.0))
    error = refused(meter, "a", 10.0)
    assert error.code == "tenant_rate_limit"
    assert error.retry_after == 2
    assert "0.5 requests per second" in error.message
    meter.enter("b", 10.0)
    refused(meter, "a", 11.9)
    meter.enter("a", 12.0)
    refused(meter, "a", 12.0)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.1, 50),
    st.integers(0, 20),
    st.lists(st.floats(0, 2), min_size=1, max_size=200),
)
def test_in_the_long_run_no_more_than_the_rate(rate: float, burst: int, pauses: list[float]) -> None:
    limits = TenantLimits(rate=rate, burst=burst)
    meter, now, served = TenantMeter(limits), 0.0, 0
    waits: list[int] = []
    for pause in pauses:
        now += pause
        try:
            meter.leave(meter.enter("a", now))
            served += 1
        except ApiError as error:
            waits.append(error.retry_after or 0)
    assert all(wait >= 1 for wait in waits)
    assert served <= limits.bucket + rate * now + 1e-6


def test_concurrency() -> None:
    meter = TenantMeter(TenantLimits(max_inflight=2))
    places = [meter.enter("a", 0.0) for _ in range(2)]
    assert refused(meter, "a", 0.0).code == "tenant_concurrency_limit"
    meter.enter("b", 0.0)
    meter.leave(places[0])
    meter.enter("a", 0.0)


def test_requests_without_a_principal_are_one_tenant() -> None:
    meter = TenantMeter(TenantLimits(max_inflight=1))
    meter.enter(None, 0.0)
    refused(meter, None, 0.0)


def test_invented_tenants_neither_fill_memory_nor_escape() -> None:
    meter = TenantMeter(TenantLimits(max_inflight=1, tracked=50))
    for number in range(50):
        meter.enter(f"busy{number}", 0.0)
    meter.enter("invented", 0.0)
    for number in range(1000):
        refused(meter, f"invented{number}", 1.0)
    assert len(meter) <= 51


def test_an_idle_tenant_makes_room_for_a_new_one_but_not_one_that_would_win_by_it() -> None:
    meter = TenantMeter(TenantLimits(rate=1, burst=2, tracked=1))
    meter.leave(meter.enter("a", 0.0))
    meter.leave(meter.enter("b", 0.5))  # a's bucket is not full yet: b shares
    meter.leave(meter.enter("b", 0.5))
    refused(meter, "c", 0.5)
    meter.leave(meter.enter("c", 60.0))
    assert len(meter) == 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.booleans()), max_size=300))
def test_every_place_comes_back(moves: list[tuple[str, bool]]) -> None:
    meter = TenantMeter(TenantLimits(max_inflight=2, rate=1e6, tracked=3))
    places: list[str | None] = []
    for now, (tenant, leave) in enumerate(moves):
        if leave and places:
            meter.leave(places.pop())
        else:
            try:
                places.append(meter.enter(tenant, float(now)))
            except ApiError:
                continue
    for place in places:
        meter.leave(place)
    for number in range(2):
        meter.enter("a", 1e6 + number)
    assert len(meter) <= 4


def test_retained_tokens_come_back_when_read_when_old_and_when_the_engine_is_gone() -> None:
    retained = Retained(100, ttl=60.0)
    retained.add("a", "d0", 60, 0.0)
    retained.add("a", "d1", 30, 10.0)
    assert retained.has_room("a", 10, 10.0)
    assert not retained.has_room("a", 11, 10.0)
    assert retained.has_room("b", 100, 10.0)
    assert not retained.has_room("b", 101, 10.0)
    retained.release("a", "d0", 60)
    retained.release("a", "d0", 60)
    assert retained.of("a", 10.0) == 30
    retained.add("a", "d0", 70, 20.0)
    retained.forget_holder("d0")
    assert retained.of("a", 20.0) == 30
    assert retained.of("a", 70.0) == 0


def test_leases_that_are_prolonged_count_until_they_are_not() -> None:
    retained = Retained(100, ttl=60.0)
    assert retained.prolong("a", "d0", "one", 60, 600.0, 0.0)
    assert not retained.prolong("a", "d0", "two", 41, 600.0, 0.0)
    assert retained.prolong("a", "d1", "two", 40, 300.0, 0.0)
    assert retained.prolong("b", "d0", "three", 100, 10.0, 0.0)
    assert not retained.prolong("b", "d0", "four", 101, 10.0, 0.0)
    # Beyond its own limit nobody loses what Pinned handles may have.
    assert retained.has_room("a", 100, 0.0)
    # Once more is not twice, and may be for longer.
    assert retained.prolong("a", "d0", "one", 60, 900.0, 100.0)
    assert retained.of("a", 299.0) == 100
    assert retained.of("a", 300.0) == 60
    assert retained.of("a", 999.0) == 60
    assert retained.of("a", 1000.0) == 0
    assert retained.of("b", 10.0) == 0


def test_what_a_lease_counted_for_comes_back_at_its_end_and_with_its_engine() -> None:
    retained = Retained(100, ttl=60.0)
    for token in ("one", "two", "three"):
        assert retained.prolong("a", "d0" if token == "one" else "d1", token, 30, 600.0, 0.0)
    retained.let_go("two")
    retained.let_go("two")
    retained.let_go("nobody's")
    assert retained.of("a", 0.0) == 60
    retained.forget_holder("d1")
    assert retained.of("a", 0.0) == 30
    # One that is refused more keeps what it had: its engine still holds that.
    assert not retained.prolong("a", "d0", "one", 101, 600.0, 0.0)
    assert retained.of("a", 0.0) == 30
    assert retained.prolong("a", "d0", "one", 100, 600.0, 0.0)
    assert retained.of("a", 0.0) == 100


def test_pinned_handles_and_leases_are_one_sum_for_leases() -> None:
    retained = Retained(100, ttl=60.0)
    retained.add("a", "d0", 60, 0.0)
    assert not retained.prolong("a", "d0", "one", 50, 600.0, 59.0)
    assert retained.prolong("a", "d0", "one", 50, 600.0, 60.0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 60), st.floats(0.0, 50.0), st.integers(0, 3)
        ),
        max_size=600,
    )
)
def test_leases_never_exceed_the_limit_and_leave_nothing(steps: list[tuple[str, int, int, float, int]]) -> None:
    retained = Retained(100, ttl=60.0)
    now = 0.0
    for tenant, number, tokens, seconds, verb in steps:
        now += seconds / 10
        if verb == 0:
            retained.let_go(f"{tenant}{number}")
        elif verb == 1:
            retained.expire(now)
        else:
            retained.prolong(tenant, f"d{number % 2}", f"{tenant}{number}", tokens, seconds, now)
        assert 0 <= retained.of(tenant, now) <= 100
    assert len(retained._ends) <= 2 * 20 + 256 + 1
    retained.expire(now + 50.0)
    assert (retained._held, retained._leases, retained._ends) == ({}, {}, [])


def test_without_a_limit_nothing_is_retained_here() -> None:
    retained = Retained(0, ttl=60.0)
    retained.add("a", "d0", 10**9, 0.0)
    assert retained.has_room("a", 10**9, 0.0)
    assert retained.prolong("a", "d0", "one", 10**9, 600.0, 0.0)
    retained.let_go("one")
    assert retained.of("a", 0.0) == 0


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        (TenantLimits(rate=-1), "--tenant-rate"),
        (TenantLimits(rate=float("nan")), "--tenant-rate"),
        (TenantLimits(rate=float("inf")), "--tenant-rate"),
        (TenantLimits(burst=1), "--tenant-burst"),
        (TenantLimits(rate=1, burst=-1), "--tenant-burst"),
        (TenantLimits(max_inflight=-1), "--tenant-max-inflight"),
        (TenantLimits(queue_share=0), "--tenant-queue-share"),
        (TenantLimits(queue_share=1.1), "--tenant-queue-share"),
        (TenantLimits(retained_tokens=-1), "--tenant-retained-tokens"),
        (TenantLimits(tracked=0), "--tenants-tracked"),
    ],
)
def test_limits_of_no_use(limits: TenantLimits, flag: str) -> None:
    [problem] = tenant_limit_problems(limits)
    assert problem.startswith(flag)
