import pytest

from ftd.schedule.rates import Rates


def test_nothing_measured():
    assert Rates().decode_step_s(1) is None
    assert Rates().chunk_tokens == 0


def test_decode_steps_are_kept_by_rows_and_the_nearest_answers():
    rates = Rates().measured(1, 0, 0.010).measured(4, 0, 0.030)
    assert rates.decode_step_s(1) == pytest.approx(0.010)
    assert rates.decode_step_s(8) == pytest.approx(0.030)
    assert rates.decode_step_s(2) == pytest.approx(0.010)
    assert rates.decode_step_s(0) is None


def test_decode_steps_follow_a_change():
    rates = Rates().measured(1, 0, 0.010)
    for _ in range(30):
        rates = rates.measured(1, 0, 0.050)
    assert rates.decode_step_s(1) == pytest.approx(0.050, rel=0.01)


def test_a_few_disturbed_steps_do_not_move_what_one_takes():
    """Those before a prompt: its text is read and cut into tokens while they run."""
    rates = Rates()
    for seconds in [0.002] * 20 + [0.007] * 8:
        rates = rates.measured(1, 0, seconds)
    assert rates.decode_step_s(1) == pytest.approx(0.002)


def test_a_chunk_costs_what_it_adds_to_its_decode_rows():
    rates = Rates().measured(2, 0, 0.010)
    for tokens in (64, 512):
        rates = rates.measured(2, tokens, 0.010 + 0.2 + 0.001 * tokens)
    assert rates.line == pytest.approx((0.2, 0.001))
    assert not rates.one_size


def test_chunks_of_one_size_are_taken_in_proportion():
    rates = Rates()
    for _ in range(200):
        rates = rates.measured(0, 512, 1.0)
    assert rates.one_size
    assert rates.line == pytest.approx((0.0, 1 / 512))


def test_older_chunks_fade():
    rates = Rates()
    for cost in (0.010, 0.001):
        for i in range(200):
            rates = rates.measured(0, 100 + 100 * (i % 2), cost * (100 + 100 * (i % 2)))
    assert rates.line == pytest.approx((0.0, 0.001), abs=0.005)


@pytest.mark.parametrize("seconds", [(1.0, 0.5), (0.1, 5.0), (0.0, 0.0)])
def test_the_line_never_goes_down_nor_starts_below_zero(seconds):
    rates = Rates()
    for tokens, s in zip((64, 512), seconds):
        rates = rates.measured(0, tokens, s)
    fixed_s, token_s = rates.line
    assert fixed_s >= 0 and token_s >= 0
