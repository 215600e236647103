import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.schedule.pace import Pace, pace
from ftd.schedule.rates import Rates

SIZES = {"least_tokens": 16, "most_tokens": 512}


def rates(decode_s, fixed_s, token_s):
    measured = Rates().measured(1, 0, decode_s)
    for n in (100, 400):
        measured = measured.measured(0, n, fixed_s + token_s * n)
    return measured


def test_without_streams_the_largest_chunk_runs():
    assert pace(Rates(), 0.0, decode_rows=0, pending_tokens=9999, **SIZES) == Pace(512, 0.0)
    assert pace(Rates(), 0.0, decode_rows=0, pending_tokens=7, **SIZES) == Pace(7, 0.0)


def test_without_prompts_no_credit_is_saved_up():
    assert pace(rates(1, 1, 1), 5.0, decode_rows=1, pending_tokens=0, **SIZES) == Pace(0, 0.0)


def test_streams_are_measured_alone_before_a_chunk_joins_them():
    measured = Rates().measured(0, 512, 1.0)
    assert pace(measured, 0.0, decode_rows=1, pending_tokens=99, **SIZES).tokens == 0
    measured = measured.measured(1, 0, 1.0)
    assert pace(measured, 0.0, decode_rows=1, pending_tokens=99, **SIZES).tokens > 0


def test_a_chunk_never_measured_starts_small():
    measured = Rates().measured(1, 0, 0.01)
    assert pace(measured, 0.0, decode_rows=1, pending_tokens=9999, **SIZES).tokens == 32


def test_costs_in_proportion_bring_small_chunks_in_every_step():
    step = pace(rates(0.03, 0.0, 0.001), 0.0, decode_rows=1, pending_tokens=9999, **SIZES)
    assert step.tokens == pytest.approx(70, abs=1)  # (1 / 0.3 - 1) * 30 ms at 1 ms each


def test_a_large_fixed_cost_brings_large_chunks_with_steps_between():
    measured, credit_s, tokens = rates(0.03, 0.5, 0.001), 0.0, []
    for _ in range(60):
        step = pace(measured, credit_s, decode_rows=1, pending_tokens=9999, **SIZES)
        credit_s = step.credit_s
        tokens.append(step.tokens)
    assert set(tokens) == {0, 512}
    assert tokens.count(512) == 60 * 0.07 // (0.5 + 0.512)


def test_a_large_chunk_is_tried_when_only_small_ones_were_measured():
    measured = Rates().measured(1, 0, 0.03)
    for _ in range(5):
        measured = measured.measured(1, 16, 0.03 + 0.4)
    credit_s, tokens = 0.0, 0
    while not tokens:
        step = pace(measured, credit_s, decode_rows=1, pending_tokens=9999, **SIZES)
        tokens, credit_s = step.tokens, step.credit_s
    assert tokens == 512


@given(
    decode_s=st.floats(1e-6, 10),
    fixed_s=st.floats(0, 10),
    token_s=st.floats(0, 1),
    pending=st.integers(1, 2000),
    rows=st.integers(1, 8),
)
def test_prompt_work_never_exceeds_what_streams_have_paid_for(
    decode_s, fixed_s, token_s, pending, rows
):
    measured, credit_s = rates(decode_s, fixed_s, token_s), 0.0
    fixed_s, token_s = measured.line
    steps, spent_s = 0, 0.0
    for _ in range(200):
        step = pace(measured, credit_s, decode_rows=rows, pending_tokens=pending, **SIZES)
        steps, credit_s = steps + 1, step.credit_s
        assert 0 <= step.tokens <= min(pending, 512)
        if step.tokens:
            spent_s += fixed_s + token_s * step.tokens
        alone_s = steps * decode_s
        assert alone_s / (alone_s + spent_s) >= 0.299
