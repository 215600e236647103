from hypothesis import given
from hypothesis import strategies as st

from ftd.lifecycle.succession import (
    FAILURE_PERIOD_S,
    MAX_FAILURES,
    Capacity,
    Footprint,
    available_after,
    available_beside,
    fits_beside,
    recovery_delay_s,
    retry_after_s,
)


@given(st.integers(0, 2**45), st.integers(0, 2**45), st.integers(0, 2**45))
def test_the_old_model_keeps_its_plan_and_gives_back_what_it_holds(available, resident, growth):
    old = Footprint(resident, growth)
    assert 0 <= available_beside(available, old) <= available
    assert available_after(available, old) == available + resident


def test_beside_only_if_nothing_is_lost():
    alone = Capacity(32768, 131072, 64)
    assert fits_beside(Capacity(32768, 131072, 64), alone)
    assert not fits_beside(Capacity(32768, 65536, 64), alone)
    assert not fits_beside(None, alone)


def test_recovery_waits_longer_each_time_then_gives_up():
    delays = [recovery_delay_s([0.0] * n, 1.0) for n in range(1, MAX_FAILURES + 2)]
    assert delays == [0.5, 1.0, 2.0, None]


def test_old_failures_are_forgiven():
    old = [0.0] * 50
    assert recovery_delay_s([*old, 2 * FAILURE_PERIOD_S], 2 * FAILURE_PERIOD_S) == 0.5


@given(st.floats(0, 1e6), st.integers(-1, 2**45), st.integers(0, 2**45))
def test_retry_after_is_always_a_sane_time(elapsed_s, done, total):
    assert 1.0 <= retry_after_s(elapsed_s, done, total) <= 60.0


def test_retry_after_extrapolates():
    assert retry_after_s(10.0, 25, 100) == 30.0
