import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.experts.split import PromptRates, prompt_share, shared_s
from ftd.schedule.pauses import KEPT, MOST_PAUSED, SLOWED, Pauses


def test_a_step_never_measured_runs_at_once():
    assert Pauses(5.0).due(5.0, None)


def test_nothing_is_due_at_the_beginning():
    assert not Pauses(5.0).due(5.0, 0.01)
    assert not Pauses(5.0).due(5.005, 0.01)
    assert Pauses(5.0).due(5.1, 0.01)


def test_what_has_run_counts_as_long_as_it_takes_alone():
    pauses = Pauses(0.0).ran(0.0, 0.03, 0.03)
    assert pauses.due(0.2, 0.01)  # 0.058 s are owed, 0.03 were given
    assert not pauses.due(0.1, 0.01)


def test_what_steps_cost_is_remembered_from_prompt_to_prompt():
    pauses = Pauses(0.0)
    for _ in range(100):
        pauses = pauses.ran(0.0, 0.012, 0.01)
    later = pauses.over().since(5.0)
    assert (later.settled_s, later.owed_s) == (5.0, 0.0)
    assert later.slower == pytest.approx(1.2, rel=1e-4)
    assert later.since(6.0) is later


def computed(
    pauses: Pauses, layer_s: float, decode_s: float, slower: float, layers: int
) -> tuple[Pauses, float, float]:
    """A prompt beside a stream: the share of its speed that this keeps, the time against alone."""
    began_s = now_s = pauses.settled_s
    steps = 0
    for _ in range(layers):
        now_s += layer_s
        while due := pauses.due(now_s, decode_s):
            now_s += due * slower * decode_s
            steps += due
            pauses = pauses.ran(now_s, due * slower * decode_s, decode_s, due)
    took_s = now_s - began_s
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
    _, kept, times = computed(Pauses(0.0, slower=slower, lost=slower), 1e-2, decode_s, slower, 200)
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
    pauses = Pauses(0.0, slower=slower, lost=slower)
    layers = int(40 * max(1, decode_s * slower / layer_s)) + 1
    pauses, kept, times = computed(pauses, layer_s, decode_s, slower, layers)
    assert kept < KEPT and 1 / times >= 1 - MOST_PAUSED - 0.05
    assert kept == pytest.approx(pauses.aim, abs=0.04)


def test_one_odd_step_does_not_turn_the_balance():
    aim = Pauses(0.0, slower=1.1, lost=1.1).aim
    assert Pauses(0.0, slower=1.1, lost=1.1).ran(0.0, 0.03, 0.01).aim == pytest.approx(
        aim, abs=0.03
    )


def test_steps_are_due_for_the_time_they_take_themselves():
    pauses = Pauses(0.0)
    assert [pauses.due(n * 0.01, 0.01) for n in (1, 5, 10, 20)] == [1, 2, 4, 8]
    assert pauses.pause_s(0.1, 0.01) == pytest.approx(0.04)
    assert pauses.pause_s(0.1, None) == 0


def shared_pass(
    pauses: Pauses, rates: PromptRates, layers: int, decode_s: float, slower: float
) -> tuple[Pauses, float, float]:
    """Experts on their way over the link while the CPU computes others, and steps run before.

    Returns:
        Also the share of its speed that the stream keeps, and the time with steps.
    """
    began_s = now_s = pauses.settled_s
    steps, launch_s, tokens = 0, 2e-3, list(range(2, 82))
    for _ in range(layers):
        pause_s = pauses.pause_s(now_s + launch_s, decode_s)
        due = pauses.due(now_s + launch_s, decode_s)
        alone, taken = (prompt_share(rates, tokens, 0, launch_s + s) for s in (0, pause_s))
        alone_s = shared_s(rates, tokens, alone, 0, launch_s)
        took_s = shared_s(rates, tokens, taken, 0, launch_s + due * slower * decode_s)
        now_s, steps = now_s + took_s, steps + due
        if due:
            free = 1 - (took_s - alone_s) / pause_s
            pauses = pauses.ran(now_s, due * slower * decode_s, decode_s, due, free)
    return pauses, steps * decode_s / (now_s - began_s), now_s - began_s


@given(
    decode_s=st.floats(1e-3, 3e-3),
    slower=st.floats(1.0, 1.9),  # of the step: the pass loses less
    cpu_s=st.floats(5e-5, 4e-4),
)
def test_both_promises_hold_with_slower_steps_where_experts_come_over_the_link(
    decode_s, slower, cpu_s
):
    rates = PromptRates(link_s=1.84e-4, cpu_s=cpu_s, cpu_row_s=1e-5, fixed_s=1e-3)
    never = Pauses(0.0, owed_s=-1e9)
    _, _, alone_s = shared_pass(never, rates, 64, decode_s, slower)
    pauses, *_ = shared_pass(Pauses(0.0), rates, 64, decode_s, slower)
    _, kept, took_s = shared_pass(pauses.over().since(0.0), rates, 64, decode_s, slower)
    assert kept >= KEPT
    assert took_s <= SLOWED * alone_s


def test_what_is_learnt_changes_what_comes_and_not_what_has_been():
    """Else a change of the aim after a long time would be a burst of steps, or a long wait."""
    for slower in (0.5, 1.0, 2.0):
        pauses = Pauses(0.0, slower=slower, lost=slower)
        for n in range(1, 100):
            pauses = pauses.ran(n * 0.01, pauses.aim * 0.01, pauses.aim * 0.01)
        assert pauses.due(0.99, 0.002) == 0 and pauses.due(1.05, 0.002) > 0
        pauses = pauses.ran(0.99, 0.02, 0.002)
        assert pauses.due(0.99, 0.002) == 0 and pauses.due(1.05, 0.002) > 0
