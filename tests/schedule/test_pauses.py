import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.schedule.pauses import KEPT, MOST_PAUSED, SLOWED, Pauses


def test_a_step_never_measured_runs_at_once():
    assert Pauses(5.0).due(5.0, None)


def test_nothing_is_due_at_the_beginning():
    assert not Pauses(5.0).due(5.0, 0.01)
    assert not Pauses(5.0).due(5.005, 0.01)
    assert Pauses(5.0).due(5.1, 0.01)


def test_what_has_run_counts_as_long_as_it_takes_alone():
    pauses = Pauses(0.0).ran(0.03, 0.03)
    assert pauses.due(0.2, 0.01)  # 0.058 s are owed, 0.03 were given
    assert not pauses.due(0.1, 0.01)


def test_what_steps_cost_is_remembered_from_prompt_to_prompt():
    pauses = Pauses(0.0)
    for _ in range(100):
        pauses = pauses.ran(0.012, 0.01)
    later = pauses.over().since(5.0)
    assert (later.began_s, later.served_s) == (5.0, 0.0)
    assert later.slower == pytest.approx(1.2, rel=1e-4)
    assert later.since(6.0) is later


def computed(
    pauses: Pauses, layer_s: float, decode_s: float, slower: float, layers: int
) -> tuple[Pauses, float, float]:
    """A prompt beside a stream: the share of its speed that this keeps, the time against alone."""
    now_s, steps = pauses.began_s, 0
    for _ in range(layers):
        now_s += layer_s
        while pauses.due(now_s, decode_s):
            now_s += slower * decode_s
            steps += 1
            pauses = pauses.ran(slower * decode_s, decode_s)
    took_s = now_s - pauses.began_s
    return pauses, steps * decode_s / took_s, took_s / (layers * layer_s)


@given(
    decode_s=st.floats(5e-4, 3e-2),  # of a layer: 1e-2
    slower=st.floats(0.8, 1.3),  # the promises meet at 4/3
    layers=st.integers(64, 200),
)
def test_both_promises_hold_while_a_step_beside_a_pass_is_at_most_a_third_slower(
    decode_s, slower, layers
):
    """8000 tokens of a model of 16 layers: four passes. The first prompt tells what steps cost."""
    pauses, *_ = computed(Pauses(0.0), 1e-2, decode_s, slower, layers)
    _, kept, times = computed(pauses.over().since(3.0), 1e-2, decode_s, slower, layers)
    grain = decode_s / (layers * 1e-2)  # a step more or less
    assert kept >= KEPT * 0.985 - grain  # nothing runs behind the last border
    assert times <= SLOWED + 2 * grain


@given(slower=st.floats(1.0, 1.3), decode_s=st.floats(5e-4, 5e-3))
def test_the_margins_are_alike(slower, decode_s):
    _, kept, times = computed(Pauses(0.0, slower=slower), 1e-2, decode_s, slower, 200)
    paused = 1 - 1 / times
    margin_kept, margin_time = kept - KEPT, ((1 - 1 / SLOWED) - paused) / slower
    assert margin_kept == pytest.approx(margin_time, abs=0.02)


@given(
    layer_s=st.floats(1e-3, 1.0),
    decode_s=st.floats(1e-3, 1.0),
    slower=st.floats(1.4, 10.0),  # beside the pass: too much for both promises
)
def test_both_are_missed_where_steps_cost_much_and_a_pass_has_half_of_the_time(
    layer_s, decode_s, slower
):
    pauses, layers = Pauses(0.0, slower=slower), int(40 * max(1, decode_s * slower / layer_s)) + 1
    pauses, kept, times = computed(pauses, layer_s, decode_s, slower, layers)
    assert kept < KEPT and 1 / times >= 1 - MOST_PAUSED - 0.05
    assert kept == pytest.approx(pauses.aim, abs=0.04)


def test_one_odd_step_does_not_turn_the_balance():
    aim = Pauses(0.0, slower=1.1).aim
    assert Pauses(0.0, slower=1.1).ran(0.03, 0.01).aim == pytest.approx(aim, abs=0.03)
