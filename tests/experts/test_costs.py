"""What misses cost a step, and the price of a background fill, where both are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.experts.costs import (
    Pace,
    StepTimes,
    allowance,
    dividing,
    fill_s,
    later_s,
    layer_s,
    step_times,
)
from ftd.experts.split import Rates, fetch_table

LINK = Rates(1000.0, 0.0, 0.0, 0.0)  # a millisecond for one expert
BOTH = Rates(1000.0, 0.0, 1000.0, 0.0, cpu_beside_link=0.5)


def steps(*times: StepTimes) -> Pace:
    pace = Pace()
    for step in times:
        pace = pace.after(step)
    return pace


def test_a_fill_delays_the_reads_it_meets():
    """Half of the step the link reads misses, so half of a copy meets reads."""
    step = dividing(LINK, range(3), 0.0).times(np.array([2, 0]), np.array([0, 2]))
    assert step == StepTimes(2e-3, link_busy_s=2e-3, slowed_s=2e-3, saved_s=2e-3, misses=2)
    rested = StepTimes(4e-3, 2e-3, 2e-3, 2e-3, 2)
    assert fill_s(LINK, rested) == pytest.approx(0.5e-3)
    assert allowance(LINK, steps(rested)).cost_misses == pytest.approx(0.5)
    assert allowance(LINK, steps(rested)).fills == pytest.approx(0.75 * 2)


def test_a_fill_beside_the_cpu_alone_takes_dram_rate_away():
    link_s, both_s, beside_s = layer_s(BOTH, 0, 1)
    assert (link_s, both_s, beside_s) == (0, 1e-3, 2e-3)


def test_what_the_hits_hide_costs_nothing():
    """The GPU's own memory takes 5 ms: one miss less would be one hit more."""
    step = step_times(np.array([layer_s(LINK, 1, 0)]), np.array([1]), np.array([5]), 1e-3)
    assert (step.step_s, step.slowed_s, step.saved_s) == (5e-3, 0, pytest.approx(-1e-3))
    offer = allowance(LINK, steps(step))
    assert offer.cost_misses == 0 and not offer.worth


def test_the_last_step_and_those_before_must_agree_that_misses_cost():
    dear, free, none = (
        StepTimes(1e-3, saved_s=s, misses=m) for s, m in ((1e-4, 1), (-1e-5, 1), (0, 0))
    )
    assert steps(dear, dear).misses_cost
    assert steps(dear, none).misses_cost, "a step without misses says nothing"
    assert not steps(dear, free).misses_cost
    assert not steps(*[free] * 20, dear, free).misses_cost
    assert steps(*[free] * 20, *[dear] * 20).misses_cost


def test_means_follow_a_change_within_tens_of_steps():
    pace = steps(StepTimes(1e-3), *[StepTimes(2e-3)] * 20)
    assert pace.mean.step_s == pytest.approx(2e-3, rel=0.02)
    assert pace.last == StepTimes(2e-3)


def test_without_a_link_or_a_step_nothing_is_filled():
    no_link = Rates(0.0, 0.0, 1000.0, 0.0)
    assert allowance(no_link, steps(StepTimes(1e-3, saved_s=1e-4, misses=1))).fills == 0
    assert allowance(LINK, Pace()).fills == 0


def test_more_misses_than_a_table_knows_count_as_its_last():
    way = dividing(LINK, range(3), 0.0)
    assert way.times(np.array([9]), np.array([0])).link_busy_s == pytest.approx(2e-3)


def test_the_later_of_two_that_vary_is_later_than_both():
    random = np.random.default_rng(0)
    for other in (0.5, 1.0, 1.3):
        drawn = np.maximum(1.0, random.normal(other, 0.2, 200_000)).mean()
        assert later_s(1.0, other, 0.2) == pytest.approx(drawn, rel=1e-3)
    assert later_s(1.0, 2.0, 0.0) == 2.0 and later_s(math.inf, 1.0, 0.1) == math.inf
    assert layer_s(BOTH, 0, 1, cpu_spread=0.2)[1] == 1e-3, "one path alone takes its mean"


rates = st.builds(
    Rates,
    st.sampled_from([0.0, 1000.0, 50_000.0]),
    st.floats(0, 1e-4),
    st.floats(100, 1e5),
    st.floats(0, 1e-4),
    st.floats(0.05, 1),
    st.floats(0.05, 1),
)


@given(rates, st.integers(0, 2**32 - 1), st.floats(0, 1e-4), st.floats(0, 1e-2))
def test_fills_fit_into_the_idle_link_at_a_price_between_nothing_and_a_copy(r, seed, hit_s, rest_s):
    random = np.random.default_rng(seed)
    misses = random.integers(0, 5, 6)
    way = dividing(r, fetch_table(r, 4, 12), hit_s)
    step = way.times(misses, 8 - misses)
    step = StepTimes(
        step.step_s + rest_s, step.link_busy_s, step.slowed_s, step.saved_s, step.misses
    )
    offer = allowance(r, steps(step))
    idle_s = step.step_s - step.link_busy_s
    assert -1e-9 <= offer.fills <= idle_s * r.link_experts_per_s + 1e-9
    assert offer.cost_misses >= 0
    if r.link_experts_per_s:
        dearest = 1 / min(r.cpu_beside_link, 1.0)
        assert -1e-12 <= fill_s(r, step) * r.link_experts_per_s <= dearest + 1e-9
