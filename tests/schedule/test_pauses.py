import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.schedule.pauses import MOST_PAUSED, SHARE, Pauses


def test_a_step_never_measured_runs_at_once():
    assert Pauses(5.0).due(5.0, None)


def test_nothing_is_due_at_the_beginning():
    assert not Pauses(5.0).due(5.0, 0.01)
    assert not Pauses(5.0).due(5.005, 0.01)
    assert Pauses(5.0).due(5.1, 0.01)


def test_what_has_run_counts_as_long_as_it_takes_alone():
    pauses = Pauses(0.0).ran(0.05, 0.03)
    assert pauses.due(0.2, 0.01)  # 0.064 s are owed, 0.03 were given
    assert not pauses.due(0.1, 0.01)


def test_a_step_that_a_pass_slows_much_leaves_the_pass_half_of_the_time():
    assert not Pauses(0.0).ran(0.6, 0.01).due(1.0, 0.01)


@given(
    layer_s=st.floats(1e-3, 1.0),
    decode_s=st.floats(1e-3, 1.0),
    slower=st.floats(1.0, 10.0),  # beside the pass
)
def test_shares(layer_s, decode_s, slower):
    pauses, now_s, steps, layers = Pauses(0.0), 0.0, 0, 0
    while now_s < 100 * max(layer_s, decode_s * slower):
        now_s += layer_s
        layers += 1
        while pauses.due(now_s, decode_s):
            now_s += slower * decode_s
            steps += 1
            pauses = pauses.ran(slower * decode_s, decode_s)
    served, own = steps * decode_s / now_s, layers * layer_s / now_s
    assert own >= 1 - max(SHARE * slower, MOST_PAUSED) - 0.05
    if SHARE * slower < MOST_PAUSED:
        assert served == pytest.approx(SHARE, abs=0.03)
