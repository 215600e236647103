"""How misses are divided: never more than there are, best by brute force, monotone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.experts.split import (
    PromptRates,
    Rates,
    beside_copies,
    fetch_table,
    finish_s,
    miss_s,
    prompt_share,
)

rates = st.builds(
    Rates,
    link_experts_per_s=st.floats(100, 50_000),
    link_fixed_s=st.floats(0, 1e-4),
    cpu_experts_per_s=st.floats(100, 50_000),
    cpu_fixed_s=st.floats(0, 1e-4),
    link_beside_cpu=st.floats(0.2, 1),
    cpu_beside_link=st.floats(0.2, 1),
    link_asked_s=st.floats(0, 1e-4),
)
misses = st.integers(0, 24)
H200 = Rates(5000.0, 3e-6, 12_700.0, 4e-6, 0.82, 0.73)  # 9.4 MB experts


def integrated(r: Rates, on_link: int, on_cpu: int, ticks: int = 4000) -> tuple[float, float]:
    """Later end of both paths, from small steps of time: the definition, slowly; and a step."""
    if not (on_link or on_cpu):
        return 0.0, 0.0
    alone = [on_link / r.link_experts_per_s, on_cpu / r.cpu_experts_per_s]
    asked = r.link_asked_s if on_link and on_cpu else 0.0
    fixed = [r.link_fixed_s + asked, r.cpu_fixed_s]
    beside = [r.link_beside_cpu, r.cpu_beside_link]
    longest = max(fixed) + sum(a / b for a, b in zip(alone, beside))
    tick, left, now, end = longest / ticks, list(alone), 0.0, 0.0
    while max(left) > 0:
        runs = [left[i] > 0 and now >= fixed[i] for i in range(2)]
        for i in range(2):
            if runs[i]:
                left[i] -= tick * (beside[i] if runs[1 - i] else 1.0)
        now += tick
        end = now
    return end, tick


@settings(max_examples=40, deadline=None)
@given(rates, st.integers(0, 12), st.integers(0, 12))
def test_layer_time_is_the_integral_of_both_rates(r, on_link, on_cpu):
    expected, tick = integrated(r, on_link, on_cpu)
    off = abs(max(finish_s(r, on_link, on_cpu)) - expected)
    assert off <= 6 * tick  # each of two starts and two ends falls within a step


@given(rates, misses)
def test_split_never_fetches_more_than_misses(r, m):
    table = fetch_table(r, m)
    assert len(table) == m + 1
    assert all(0 <= fetched <= count for count, fetched in enumerate(table))


@given(rates, misses)
def test_split_is_the_best_of_all_and_ties_go_to_the_link(r, m):
    times = [max(finish_s(r, fetched, m - fetched)) for fetched in range(m + 1)]
    chosen = fetch_table(r, m)[m]
    assert times[chosen] == min(times)
    assert all(t > times[chosen] for t in times[chosen + 1 :])


@given(rates, misses)
def test_more_misses_never_take_less_time(r, m):
    table = fetch_table(r, m)
    times = [max(finish_s(r, f, count - f)) for count, f in enumerate(table)]
    assert all(b >= a - 1e-15 for a, b in pairwise(times))


@given(st.floats(100, 20_000), st.floats(1, 8), st.floats(100, 20_000), misses)
def test_a_faster_link_never_reads_less_when_nothing_is_shared(link, factor, cpu, m):
    slow = fetch_table(Rates(link, 0, cpu, 0), m)
    fast = fetch_table(Rates(link * factor, 0, cpu, 0), m)
    assert all(b >= a for a, b in zip(slow, fast))


@given(rates, st.integers(1, 24))
def test_a_missing_path_is_never_used(r, m):
    no_cpu = Rates(r.link_experts_per_s, r.link_fixed_s, 0.0, r.cpu_fixed_s)
    no_link = Rates(0.0, r.link_fixed_s, r.cpu_experts_per_s, r.cpu_fixed_s)
    assert fetch_table(no_cpu, m) == tuple(range(m + 1))
    assert fetch_table(no_link, m) == (0,) * (m + 1)
    assert math.isinf(finish_s(no_cpu, 0, 1)[1]) and math.isinf(finish_s(no_link, 1, 0)[0])


@settings(max_examples=60)
@given(rates, misses, st.sampled_from([2, 6]))
def test_parts_of_experts_are_never_slower_than_whole_ones(r, m, parts):
    table, whole = fetch_table(r, m, parts), fetch_table(r, m)

    def layer_s(count, on_link):
        return max(finish_s(r, on_link, count - on_link))

    for count, (divided, others) in enumerate(zip(table, whole)):
        assert 0 <= divided <= count and parts * divided == round(parts * divided)
        assert layer_s(count, divided) <= layer_s(count, others)
        assert divided == others or layer_s(count, divided) < layer_s(count, others)


def test_one_miss_is_shared_where_both_paths_end_together():
    """133 µs on the CPU or 200 over the link; both at once: 98."""
    measured = Rates(5100.0, 3e-6, 10_300.0, 36e-6, 0.94, 0.9)
    table = fetch_table(measured, 24, 12)
    assert table[:3] == (0, 5 / 12, 9 / 12)
    assert max(finish_s(measured, table[1], 1 - table[1])) < 0.75 * max(finish_s(measured, 0, 1))
    for count, chosen in enumerate(table):
        times = [max(finish_s(measured, n / 12, count - n / 12)) for n in range(12 * count + 1)]
        assert max(finish_s(measured, chosen, count - chosen)) == min(times)


def test_a_link_that_waits_while_the_cpu_is_asked_reads_less():
    """The H200 machine: one missed expert took 81 µs with 3 of 12 parts over the link, 85 with 2
    and 84 with 4; two took 142 with 6 of 24, 149 with 4 and 151 with 8."""
    rates = Rates(5446.0, 4e-6, 15_080.0, 34e-6, 0.91, 0.98, link_asked_s=17e-6)
    assert fetch_table(rates, 2, 12) == (0, 3 / 12, 6 / 12)
    assert fetch_table(replace(rates, link_asked_s=0.0), 2, 12) == (0, 4 / 12, 7 / 12)


def test_known_machine_splits_as_its_rates_say():
    """One miss: 79 µs on the CPU against 200 over the link. Many: about 0.31 of them by link."""
    table = fetch_table(H200, 64)
    assert table[:3] == (0, 0, 0)
    share = 0.82 * 5000 / (0.82 * 5000 + 0.73 * 12_700)
    assert table[64] == pytest.approx(64 * share, abs=1)


@pytest.mark.parametrize("parts", [1, 12])
def test_beside_copies_a_step_leaves_more_to_the_cpu(parts):
    alone, beside = (fetch_table(rates, 16, parts) for rates in (H200, beside_copies(H200)))
    assert all(b <= a for a, b in zip(alone, beside)) and sum(beside) < sum(alone)
    no_cpu = Rates(1000.0, 0.0, 0.0, 0.0)
    assert fetch_table(beside_copies(no_cpu), 4) == (0, 1, 2, 3, 4)


class TestPromptShare:
    rates = PromptRates(link_s=2.0, cpu_s=1.0, cpu_row_s=0.1, fixed_s=0.5)

    def test_both_end_together_when_all_experts_have_few_tokens(self):
        assert prompt_share(self.rates, [1] * 30) == 20  # 20.5 s here, 20 s on the link

    def test_experts_with_many_tokens_stay_with_the_link(self):
        assert prompt_share(self.rates, [1, 1, 1, 500, 500]) == 3
        assert prompt_share(self.rates, [500, 500]) == 0

    def test_what_takes_the_link_besides_leaves_more_to_the_cpu(self):
        assert prompt_share(self.rates, [1] * 30, on_link=6) == 24

    def test_nothing_is_gained_by_a_fixed_cost_above_the_whole(self):
        assert prompt_share(PromptRates(2.0, 1.0, 0.1, fixed_s=9.0), [1, 1, 1]) == 0
        assert prompt_share(self.rates, []) == 0

    def test_no_other_share_is_faster(self):
        random = np.random.default_rng(1)
        for _ in range(200):
            tokens = sorted(random.integers(1, 60, random.integers(1, 30)).tolist())
            rates = PromptRates(*random.random(4).tolist())

            def layer_s(taken, tokens=tokens, rates=rates):
                own = [max(rates.cpu_s, n * rates.cpu_row_s) for n in tokens[:taken]]
                cpu_s = sum(own) + rates.fixed_s if taken else 0.0
                return max(cpu_s, (len(tokens) - taken) * rates.link_s)

            best = min(layer_s(n) for n in range(len(tokens) + 1))
            assert layer_s(prompt_share(rates, tokens)) == pytest.approx(best)


def test_a_miss_costs_less_where_both_paths_share_it():
    link = Rates(5000.0, 5e-6, 0.0, 0.0)
    both = Rates(5000.0, 5e-6, 11_000.0, 36e-6, 0.9, 0.9)
    assert miss_s(link) == pytest.approx(1 / 5000 + 5e-6 / 2)
    assert 1 / 16_000 < miss_s(both) < miss_s(link)
