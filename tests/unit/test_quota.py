"""Quotas of tenants, and how fast a queue drains: time is an argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.drain_rate import DrainRate
from gateway.routing.quota import Quota, TokenBucket
from wire.pools import TenantSettings


def test_a_second_s_worth_may_come_at_once_and_then_as_many_as_the_rate_says() -> None:
    quota = Quota(TenantSettings(requests_per_second=10))
    now, admitted = 100.0, 0
    while now < 103.0:
        if quota.wait(0, now) == 0:
            quota.take(0)
            admitted += 1
        else:
            now += 0.01
    assert admitted == pytest.approx(10 + 30, abs=1)


def test_the_wait_told_is_the_wait_needed() -> None:
    quota = Quota(TenantSettings(requests_per_second=0.5))
    quota.take(0)
    wait = quota.wait(0, 0.0)
    assert wait == pytest.approx(2.0)
    assert quota.wait(0, wait - 0.01) > 0
    assert quota.wait(0, wait) == 0


def test_something_larger_than_the_bucket_is_let_through_when_it_is_full_and_owed_for() -> None:
    quota = Quota(TenantSettings(bytes_per_second=1000))
    assert quota.wait(5000, 0.0) == 0
    quota.take(5000)
    assert quota.wait(1, 0.0) == pytest.approx(4.001)
    assert quota.wait(5000, 4.5) > 0
    assert quota.wait(5000, 5.0) == 0


def test_the_stricter_quota_decides_and_without_any_nothing_is_refused() -> None:
    both = Quota(TenantSettings(requests_per_second=1, bytes_per_second=10))
    both.take(10)
    assert both.wait(10, 0.0) == pytest.approx(1.0)
    free = Quota(TenantSettings())
    free.take(10**9)
    assert free.wait(10**9, 0.0) == 0


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 50)), min_size=1, max_size=60),
)
def test_no_more_is_let_through_than_rate_and_burst_allow(rate: float, asked: list[tuple[float, float]]) -> None:
    bucket, now, taken, largest = TokenBucket(rate, 1.0), 0.0, 0.0, 0.0
    for pause, amount in asked:
        now += pause
        if bucket.wait_for(amount, now) == 0:
            bucket.take(amount)
            taken += amount
            largest = max(largest, amount)
    assert taken <= max(rate, 1.0) + rate * now + largest + 1e-6


# -- how fast a queue drains ------------------------------------------------------------------------------


def test_a_steady_pace_is_known_soon_and_a_new_one_after_a_while() -> None:
    rate, now = DrainRate(), 50.0
    rate.on_wait(now)
    assert rate.per_second(now) is None
    for _ in range(20):
        now += 0.1
        rate.on_grant(now)
    assert rate.per_second(now) == pytest.approx(10, rel=0.1)
    for _ in range(60):
        now += 1.0
        rate.on_grant(now)
    assert rate.per_second(now) == pytest.approx(1, rel=0.1)


def test_a_quiet_time_does_not_make_the_queue_look_slow() -> None:
    rate = DrainRate()
    rate.on_wait(0.0)
    for tick in range(1, 101):
        rate.on_grant(tick * 0.1)
    rate.on_wait(10_000.0)
    assert rate.per_second(10_000.0) == pytest.approx(10, rel=0.1)


def test_a_queue_that_stands_still_is_slower_with_every_second() -> None:
    rate = DrainRate()
    rate.on_wait(0.0)
    rate.on_grant(0.5)
    paces = [rate.per_second(now) or 0.0 for now in (1.0, 5.0, 20.0, 200.0)]
    assert paces == sorted(paces, reverse=True)
    assert paces[-1] < 0.01
