"""The price of background fills in an engine: given until it is measured, then followed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_core import cuda_core
from driving import answer_all, request

from ftd.cuda.fill_price import UNMEASURED, FillPrice
from ftd.experts import costs
from ftd.experts.costs import Pace, StepTimes, dividing
from ftd.experts.profile import BATCHES, Figures, Line, Profile
from ftd.experts.split import Rates

MODEL = Path(__file__).parents[1] / "data/script-model"
RATES = Rates(1000.0, 0.0, 0.0, 0.0)
WAYS = [dividing(RATES, range(8 * rows + 1), 0.0) for rows in BATCHES]
MISSES, HITS = np.array([1, 0, 1]), np.array([1, 2, 1])


def test_a_decode_step_is_priced_by_what_it_missed_and_took():
    price = FillPrice()
    price.routed(1, MISSES, HITS)
    price.took(1, 4e-3)
    assert price.allowance == UNMEASURED, "no rates yet"
    price.divide(WAYS)
    price.routed(1, MISSES, HITS)
    assert price.allowance == UNMEASURED, "the step is not over"
    price.took(1, 4e-3)
    step = StepTimes(4e-3, link_busy_s=2e-3, slowed_s=2e-3, saved_s=2e-3, misses=2)
    assert price.allowance == costs.allowance(RATES, Pace().after(step))
    assert price.allowance.cost_misses == pytest.approx(0.5)


def test_a_prompt_and_a_step_beside_it_leave_the_price():
    price = FillPrice()
    price.divide(WAYS)
    price.took(3, 1.0)
    price.routed(2, MISSES, HITS)
    price.took(0, 1.0)
    price.took(2, 1.0)  # of a step whose routing nobody told
    assert price.allowance == UNMEASURED


def test_each_number_of_rows_has_its_way_of_dividing():
    ways = [dividing(Rates(1000.0 / rows, 0.0, 0.0, 0.0), range(9), 0.0) for rows in BATCHES]
    for rows, slower in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 8)):
        price = FillPrice()
        price.divide(ways)
        price.routed(rows, MISSES, HITS)
        price.took(rows, 0.1)
        assert price.allowance.fills == pytest.approx(0.75 * (0.1 - 2e-3 * slower) * 1000 / slower)


def test_an_engine_measures_its_price():
    with cuda_core(MODEL, slots=12, fetch_of=[0, 1], max_running=2) as core:
        profiling = core.profiling
        figures = (Figures(1, Line(5000.0, 3e-6), Line(10_000.0, 1e-6), Line(300_000.0), 0.9, 0.8),)
        answer_all(core, [request("before", range(5, 15))])
        assert core.experts.fill_price.allowance == UNMEASURED
        profiling.take(Profile(profiling._bench.key, 1000, figures))
        answer_all(core, [request("a", range(5, 15)), request("b", range(7, 17))])
        measured = core.experts.fill_price.allowance
        assert measured != UNMEASURED and measured.fills > 0 and measured.cost_misses >= 0
