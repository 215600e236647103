"""Leaving the GPU's memory to others: a small model of a GPU that two processes share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftd.memory.yielding import CALM_S, HIGH_BYTES, LOW_BYTES, SPARE_BYTES, Calm, next_budget
from ftd.units import GiB, MiB

TOTAL = 24 * GiB


def run(budget: int, others: list[int], seconds_each: int = 40, need: int = 10**15) -> list[int]:
    """Budgets in force at each second, while others take what the list says.

    ``need``: no more than that is used of a budget.
    """
    calm, seen, now_s = Calm(), [], 0.0
    for taken in others:
        for _ in range(seconds_each):
            now_s += 1
            used = min(budget, need)
            free = max(0, TOTAL - taken - used)
            found, calm = next_budget(budget, used, free, TOTAL, calm, now_s)
            budget = budget if found is None else found
            seen.append(budget)
    return seen


def test_it_yields_at_once_and_takes_back_after_a_calm_time():
    seen = run(20 * GiB, [0, 8 * GiB, 0], seconds_each=90)
    quiet, pressed, back = seen[89], seen[90:180], seen[180:]
    assert quiet >= TOTAL - HIGH_BYTES
    assert pressed[0] <= quiet - SPARE_BYTES + 256 * MiB, "more goes with each look"
    assert pressed[12] <= TOTAL - 8 * GiB - LOW_BYTES
    assert back[int(CALM_S) - 1] == pressed[-1] and back[-1] == quiet


@given(st.integers(0, TOTAL), st.integers(0, TOTAL))
def test_constant_use_by_others_comes_to_rest(budget, taken):
    seen = run(budget, [taken], seconds_each=200)
    assert len(set(seen[100:])) == 1
    free = TOTAL - taken - seen[-1]
    assert seen[-1] == 0 or free >= LOW_BYTES
    assert all(0 <= b <= TOTAL for b in seen)


@given(st.integers(0, TOTAL), st.integers(0, TOTAL), st.floats(0, 1e6))
def test_within_the_band_nothing_happens(budget, free, now_s):
    found, _ = next_budget(budget, budget, free, TOTAL, Calm(), now_s)
    if free >= LOW_BYTES:
        assert found is None, "growing waits for a calm time"
    else:
        assert found is not None and found <= budget


def test_a_budget_that_is_not_used_up_stays_until_what_is_used_is_in_the_way():
    seen = run(20 * GiB, [0, 12 * GiB, 19 * GiB, 0], seconds_each=100, need=6 * GiB)
    alone, beside, pressed, back = (seen[i : i + 100] for i in range(0, 400, 100))
    assert set(alone[50:]) == {23 * GiB}, "all but the spare"
    assert set(beside) == {alone[-1]}, "what others take nobody uses"
    assert pressed[-1] <= 5 * GiB - LOW_BYTES
    assert back[-1] == 23 * GiB
