"""Admission and eviction: decisions that can be carried out, and that follow the router."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.experts import policy
from ftd.experts.costs import Allowance
from ftd.experts.policy import Tuning

TUNING = Tuning()
NOTHING = Allowance(0.0, 0.0)


@st.composite
def situations(draw):
    layers, experts = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    state = policy.new_state(layers, experts, min(2, experts))
    for _ in range(draw(st.integers(0, 30))):
        policy.observe(state, TUNING, random.random((layers, experts)) < random.random())
    state.demand = draw(st.floats(0, 20))
    state.credit = draw(st.floats(0, 20))
    state.quiet_steps = draw(st.integers(0, 40))
    resident = random.random((layers, experts)) < draw(st.floats(0, 1))
    used = random.random((layers, experts)) < draw(st.floats(0, 1))
    num_free = draw(st.integers(0, int((~resident).sum())))
    allowance = Allowance(draw(st.floats(0, 20)), draw(st.floats(0, 10)))
    return state, resident, used, num_free, draw(st.integers(0, 20)), allowance


@given(situations())
def test_every_plan_can_be_carried_out(situation):
    state, resident, used, num_free, wanted, allowance = situation
    plan = policy.plan(state, TUNING, resident, used, num_free, wanted, allowance)
    leaves, comes = plan.evict, plan.fill
    assert resident.ravel()[leaves].all() and not used.ravel()[leaves].any()
    assert not resident.ravel()[comes].any()
    assert len(np.unique(leaves)) == len(leaves) and len(np.unique(comes)) == len(comes)
    assert len(comes) <= num_free + len(leaves)
    assert plan.value.shape == plan.admit.shape == resident.shape


@given(situations())
def test_those_who_leave_are_worth_less_than_those_who_stay(situation):
    state, resident, used, num_free, wanted, allowance = situation
    plan = policy.plan(state, TUNING, resident, used, num_free, wanted, allowance)
    stays = (resident & ~used).ravel()
    stays[plan.evict] = False
    if len(plan.evict) and stays.any():
        value = plan.value.ravel()
        assert value[plan.evict].max() <= value[stays].min()


def test_while_slots_are_free_all_are_welcome_and_nobody_leaves():
    state = policy.new_state(2, 8, 2)
    resident = np.zeros((2, 8), bool)
    resident[0, :3] = True
    policy.observe(state, TUNING, resident)
    plan = policy.plan(state, TUNING, resident, ~resident, 5, 3, NOTHING)
    assert plan.admit.all() and not len(plan.evict)


def test_free_slots_are_filled_in_the_background_with_what_is_used_most():
    state = policy.new_state(1, 8, 2)
    for _ in range(50):
        policy.observe(state, TUNING, np.array([[0, 0, 1, 0, 0, 1, 0, 0]]))
    plan = policy.plan(
        state, TUNING, np.zeros((1, 8), bool), np.zeros((1, 8), bool), 2, 0, Allowance(2, 0)
    )
    assert sorted(plan.fill) == [2, 5]


def test_admission_never_stops_however_dear_a_fill_is():
    """All misses on the CPU and a fill at the price of 1000 misses: one comes in now and then."""
    state = policy.new_state(1, 4, 1)
    resident, used = (
        np.array([[True, False, False, False]]),
        np.array([[False, False, True, False]]),
    )
    fills = 0
    for _ in range(4 * TUNING.max_quiet_steps):
        policy.observe(state, TUNING, used)
        fills += len(policy.plan(state, TUNING, resident, used, 0, 0, Allowance(1, 1000)).fill)
    assert fills == 4


def test_admission_never_stops_where_values_tell_nothing():
    """Misses that would be stored do not count as long as no slot is empty for them."""
    random = np.random.default_rng(2)
    state = policy.new_state(4, 64, 8)
    resident = np.zeros((4, 64), bool)
    resident[:, :32] = True
    for _ in range(100):
        policy.observe(state, TUNING, random.random((4, 64)) < 0.3)
    assert state.trust < TUNING.least_trust
    fills = 0
    for _ in range(4 * TUNING.max_quiet_steps):
        used = random.random((4, 64)) < 0.3
        policy.observe(state, TUNING, used)
        fills += len(policy.plan(state, TUNING, resident, used, 0, 3, Allowance(2, 1)).fill)
    assert 1 <= fills <= 8, "by chance values tell something for a few steps"


def test_little_moves_when_routing_is_even():
    """Estimates of equal experts differ by noise alone; swapping them would only cost."""
    random = np.random.default_rng(0)
    state = policy.new_state(4, 64, 8)
    resident = np.zeros((4, 64), bool)
    resident[:, :32] = True
    swaps = 0
    for step in range(400):
        used = random.random((4, 64)) < 0.5
        policy.observe(state, TUNING, used)
        plan = policy.plan(state, TUNING, resident, used, 0, 0, Allowance(4, 0.5))
        swaps += len(plan.fill) if step > 100 else 0
        resident.ravel()[plan.evict], resident.ravel()[plan.fill] = False, True
    assert swaps < 0.1 * 4 * 300  # a tenth of what the allowance would carry


def test_what_is_surely_used_more_in_the_long_run_comes_in_though_it_earns_little_a_step():
    """Used each 25th step against never: a fill at the price of one miss is earned back late."""
    filled = []
    for steps in (20, 200):
        state = policy.new_state(1, 4, 1)
        resident = np.array([[True, False, True, True]])
        for step in range(steps):
            policy.observe(state, TUNING, np.array([[False, step % 25 == 0, True, True]]))
        plan = policy.plan(state, TUNING, resident, ~resident, 0, 0, Allowance(4, 1))
        filled.append(plan.fill.tolist())
    assert filled == [[], [1]], "one use of one may be chance, eight of none are not"


def test_chance_makes_no_difference_sure():
    """All experts are equal: of the pairs that differ most few look as if they did."""
    random = np.random.default_rng(4)
    state = policy.new_state(4, 64, 8)
    for _ in range(1000):
        policy.observe(state, TUNING, random.random((4, 64)) < 0.06)
    one, other = random.permutation(4 * 64)[:200].reshape(2, 100)
    assert policy._lasting(state, TUNING, one, other).mean() < 0.06
    assert policy._lasting(state, TUNING, one, np.full(100, -1)).mean() > 0.9


def test_values_that_tell_nothing_are_not_trusted():
    """Even routing: what estimates say of the next step is noise. A skewed router's are true."""
    random = np.random.default_rng(1)
    for odds, lowest, highest in ((0.3, 0.0, 0.15), (random.random((4, 64)) ** 3, 0.8, 1.0)):
        state = policy.new_state(4, 64, 8)
        for _ in range(300):
            policy.observe(state, TUNING, random.random((4, 64)) < odds)
        assert lowest <= state.trust <= highest


def test_where_misses_cost_nothing_nothing_comes_in_but_now_and_then():
    state = policy.new_state(1, 8, 2)
    resident = np.array([[True] * 4 + [False] * 4])
    fills = 0
    for _ in range(4 * TUNING.max_quiet_steps):
        policy.observe(state, TUNING, ~resident)
        plan = policy.plan(state, TUNING, resident, ~resident, 0, 0, Allowance(4, 0, worth=False))
        assert not plan.admit.any()
        fills += len(plan.fill)
    assert fills == 4


def test_favourites_of_before_leave_in_the_order_of_their_last_use():
    state = policy.new_state(1, 3, 1)
    for _ in range(500):
        policy.observe(state, TUNING, np.array([[1, 1, 0]]))
    for step in range(100):
        policy.observe(state, TUNING, np.array([[0, step < 20, 1]]))
    never_more, a_while_longer, now = policy.value(state, TUNING)[0]
    assert never_more < a_while_longer < 0.05 < now


@pytest.mark.parametrize("text_steps, lowest, highest", [(10_000, 0.1, 0.2), (24, 0.65, 0.8)])
def test_the_average_that_tells_more_has_more_weight(text_steps, lowest, highest):
    """The same experts are popular all along, or others with each text."""
    random = np.random.default_rng(7)
    state = policy.new_state(4, 64, 8)
    weights = []
    for step in range(800):
        if step % text_steps == 0:
            odds = random.random((4, 64)) ** 6
        policy.observe(state, TUNING, random.random((4, 64)) < odds)
        weights.append(state.recent_weight)
    assert set(weights[:25]) == {0.4}, "too little is known to weigh by"
    assert lowest <= np.mean(weights[200:]) <= highest


def test_where_all_experts_are_used_alike_there_is_nothing_to_weigh():
    state = policy.new_state(2, 4, 4)
    for _ in range(60):
        policy.observe(state, TUNING, np.ones((2, 4), bool))
    assert state.recent_weight == 0.4


def test_value_follows_a_change_of_text_within_tens_of_steps():
    state = policy.new_state(1, 4, 1)
    for _ in range(2000):
        policy.observe(state, TUNING, np.array([[1, 1, 0, 0]]))
    for _ in range(64):
        policy.observe(state, TUNING, np.array([[0, 0, 1, 1]]))
    value = policy.value(state, TUNING)[0]
    assert value[2:].min() > value[:2].max()


def test_a_long_prompt_does_not_wipe_what_is_known():
    state = policy.new_state(1, 4, 1)
    for _ in range(2000):
        policy.observe(state, TUNING, np.array([[0.9, 0.1, 0, 0]]))
    known = policy.value(state, TUNING).copy()
    steps = policy.prefill_steps(TUNING, 100_000)
    policy.observe(state, TUNING, np.array([[0, 0, 0.5, 0.5]]), steps)
    assert policy.value(state, TUNING)[0, 0] > 0.3 * known[0, 0]


@given(st.integers(0, 2**32 - 1), st.floats(1, 64))
def test_value_after_tells_what_observing_brings(seed, steps):
    random = np.random.default_rng(seed)
    state = policy.new_state(3, 8, 2)
    for _ in range(5):
        policy.observe(state, TUNING, random.random((3, 8)))
    uses = random.random((3, 8))
    told = [policy.value_after(state, TUNING, layer, uses[layer], steps) for layer in range(3)]
    policy.observe(state, TUNING, uses, steps)
    np.testing.assert_allclose(policy.value(state, TUNING), np.stack(told), rtol=1e-4, atol=1e-6)
