from hypothesis import given
from hypothesis import strategies as st

from ftd.lifecycle.succession import (
    FAILURE_PERIOD_S,
    HEADROOM_BYTES,
    MAX_FAILURES,
    Need,
    Preflight,
    fits_beside,
    recovery_delay_s,
    retry_after_s,
)


def test_fits_beside_asks_every_memory():
    roomy, tight = Need(100, 100 + HEADROOM_BYTES), Need(101, 100 + HEADROOM_BYTES)
    assert fits_beside(Preflight(roomy, None, ()))
    assert fits_beside(Preflight(roomy, roomy, ()))
    assert not fits_beside(Preflight(tight, roomy, ()))
    assert not fits_beside(Preflight(roomy, tight, ()))


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
