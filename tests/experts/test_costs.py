"""What misses cost a step, and the price of a background fill, where both are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.experts.costs import Pace, StepTimes, allowance, fill_s, layer_s, price_s, step_times
from ftd.experts.split import Rates, fetch_table

LINK = Rates(1000.0, 0.0, 0.0, 0.0)  # a millisecond for one expert
BOTH = Rates(1000.0, 0.0, 1000.0, 0.0, cpu_beside_link=0.5)


def link_step(misses: list[int], hits: list[int], hit_s: float, rest_s: float) -> StepTimes:
    layers_s = np.array([layer_s(LINK, missed, 0) for missed in misses])
    return step_times(layers_s, np.array(misses), np.array(hits), hit_s, rest_s)


def steps(*times: StepTimes) -> Pace:
    pace = Pace()
    for step in times:
        pace = pace.after(step)
    return pace


def test_a_fill_delays_the_reads_it_meets():
    """Half of the step the link reads misses, so half of a copy meets reads."""
    step = link_step([2, 0], [0, 2], hit_s=0.0, rest_s=2e-3)
    assert step == StepTimes(4e-3, link_busy_s=2e-3, slowed_s=2e-3, saved_s=2e-3, misses=2)
    assert fill_s(LINK, step) == price_s(LINK, step) == pytest.approx(0.5e-3)
    assert allowance(LINK, steps(step)).cost_misses == pytest.approx(0.5)
    assert allowance(LINK, steps(step)).fills == pytest.approx(0.75 * 2)


def test_a_fill_beside_the_cpu_alone_takes_dram_rate_away():
    assert layer_s(BOTH, 0, 1) == (0, 1e-3, 2e-3)
    step = step_times(np.array([layer_s(BOTH, 0, 1)]), np.array([1]), np.array([0]), 0.0)
    assert fill_s(BOTH, step) == price_s(BOTH, step) == pytest.approx(0.5e-3)


def test_a_read_that_ends_before_the_cpu_may_take_longer_for_nothing():
    slow_cpu = Rates(1000.0, 0.0, 200.0, 0.0)
    step = step_times(np.array([layer_s(slow_cpu, 1, 1)]), np.array([2]), np.array([0]), 0.0)
    assert (step.step_s, step.slowed_s) == (5e-3, 0)
    assert fill_s(slow_cpu, step) == 0 and price_s(slow_cpu, step) == pytest.approx(0.2e-3)


def test_what_the_hits_hide_costs_nothing():
    """The GPU's own memory takes 5 ms: one miss less would be one hit more."""
    step = link_step([1], [5], hit_s=1e-3, rest_s=0.0)
    assert (step.step_s, step.slowed_s, step.saved_s) == (5e-3, 0, pytest.approx(-1e-3))
    assert not allowance(LINK, steps(step)).worth


def test_means_follow_a_change_within_tens_of_steps():
    first = StepTimes(1e-3, misses=3)
    assert steps(first) == Pace(first, first), "the first step is all that is known"
    pace = steps(first, *[StepTimes(2e-3)] * 20)
    assert pace.mean.step_s == pytest.approx(2e-3, rel=0.02)
    assert pace.last == StepTimes(2e-3)


def test_the_last_step_and_those_before_must_agree_that_misses_cost():
    dear, free, none = (
        StepTimes(1e-3, saved_s=s, misses=m) for s, m in ((1e-4, 1), (-1e-5, 1), (0, 0))
    )
    assert steps(dear, dear).misses_cost
    assert steps(dear, none).misses_cost, "a step without misses says nothing"
    assert not steps(dear, free).misses_cost
    assert not steps(*[free] * 20, dear, free).misses_cost
    assert steps(*[free] * 20, *[dear] * 20).misses_cost


def test_without_a_link_or_a_step_nothing_is_filled():
    no_link = Rates(0.0, 0.0, 1000.0, 0.0)
    assert allowance(no_link, steps(StepTimes(1e-3, saved_s=1e-4, misses=1))).fills == 0
    assert allowance(LINK, Pace()).fills == 0


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
def test_fills_fit_into_the_idle_link_and_take_no_more_than_a_copy(r, seed, hit_s, rest_s):
    misses = np.random.default_rng(seed).integers(0, 5, 6)
    on_link = np.array(fetch_table(r, 4, 12))[misses]
    layers_s = np.array([layer_s(r, f, m - f) for m, f in zip(misses, on_link, strict=True)])
    step = step_times(layers_s, misses, 8 - misses, hit_s, rest_s)
    offer = allowance(r, steps(step))
    idle_s = step.step_s - step.link_busy_s
    assert -1e-9 <= offer.fills <= idle_s * r.link_experts_per_s + 1e-9
    assert offer.cost_misses >= 0
    if r.link_experts_per_s and step.step_s:
        assert 0 <= fill_s(r, step) * r.link_experts_per_s <= 1 + 1e-9
