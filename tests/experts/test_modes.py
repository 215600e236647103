"""The mode that is measured slower is left, and a right choice is hardly disturbed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.experts.modes import Mode, State, Tuning, after_step

TUNING = Tuning()


def run(steps, step_s, state=None, *, noise=0.0, seed=0):
    """Modes in force, seconds in all, and the state at the end; ``step_s(mode, step)``."""
    random, state = np.random.default_rng(seed), state or State()
    modes, total = [], 0.0
    for step in range(steps):
        seconds = step_s(state.mode, step) * (1 + noise * random.standard_normal())
        modes.append(state.mode)
        total += seconds
        state = after_step(state, TUNING, max(1e-6, seconds), misses=5)
    return modes, total, state


@pytest.mark.parametrize("faster", list(Mode))
@settings(max_examples=10)
@given(advantage=st.floats(0.08, 0.9), noise=st.floats(0.0, 0.15), seed=st.integers(0, 50))
def test_the_faster_mode_is_in_force_soon_and_almost_always(faster, advantage, noise, seed):
    def step_s(mode, step):
        return 2e-3 * (1 - advantage if mode is faster else 1.0)

    modes, total, state = run(5000, step_s, noise=noise, seed=seed)
    assert state.settled is faster
    best = 5000 * 2e-3 * (1 - advantage)
    late = modes[1500:]
    assert late.count(faster) > 0.85 * len(late)
    if advantage < 0.5:
        assert total < 1.1 * best + 1500 * 2e-3 * advantage


def test_a_slow_split_is_left_within_some_hundred_steps():
    modes, _, _ = run(2000, lambda mode, step: 3e-3 if mode is Mode.SPLIT else 2.5e-3)
    assert modes[0] is Mode.SPLIT
    assert modes.index(Mode.LINK) < 1200
    assert set(modes[1400:2000]) == {Mode.LINK}


def test_a_trial_that_is_clearly_slower_is_short():
    modes, total, _ = run(8000, lambda mode, step: 2.8e-3 if mode is Mode.LINK else 2e-3, noise=0.2)
    assert 0 < modes.count(Mode.LINK) < 0.015 * len(modes)
    assert total < 1.01 * 8000 * 2e-3
    assert Mode.LINK not in modes[:1100], "an answer of usual length is not disturbed"


def test_equal_modes_do_not_take_turns():
    modes, _, _ = run(50_000, lambda mode, step: 2e-3, noise=0.1)
    changes = sum(a is not b for a, b in itertools.pairwise(modes))
    assert changes < 40
    assert modes.count(Mode.LINK) < 0.05 * len(modes)


def test_trials_grow_rare_but_never_end():
    modes, _, state = run(120_000, lambda mode, step: 3e-3 if mode is Mode.LINK else 2e-3)
    tried = [i for i in range(1, len(modes)) if modes[i] is Mode.LINK and modes[i - 1] != modes[i]]
    gaps = np.diff(tried)
    assert (np.diff(gaps) >= 0).all() and gaps[-1] > 100 * TUNING.window_steps
    assert state.wait_windows > 100


def test_what_becomes_faster_later_is_found():
    """Another program takes the CPU: dividing was right and no longer is."""

    def step_s(mode, step):
        if mode is Mode.SPLIT:
            return 2e-3 if step < 20_000 else 4e-3
        return 2.5e-3

    modes, _, state = run(60_000, step_s)
    assert modes[19_000] is Mode.SPLIT and state.settled is Mode.LINK


def test_a_drift_that_favours_neither_changes_nothing():
    _, _, state = run(20_000, lambda mode, step: 2e-3 + step * 2e-7)
    assert state.settled is Mode.SPLIT
    _, _, state = run(20_000, lambda mode, step: 6e-3 - step * 2e-7)
    assert state.settled is Mode.SPLIT


def test_steps_without_misses_tell_nothing():
    state = State()
    for _ in range(10_000):
        assert after_step(state, TUNING, 1e-3, misses=0) is state
