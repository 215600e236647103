import pytest

from ftd.engine.meter import WINDOW_S, Meter


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def run(meter, clock, steps, drawn, prompt_tokens, seconds):
    for _ in range(steps):
        clock.now_s += seconds
        meter.step(drawn, prompt_tokens, seconds)


def test_pace_leaves_out_the_time_in_which_nothing_was_computed(clock):
    meter = Meter(clock)
    run(meter, clock, 10, drawn=1, prompt_tokens=0, seconds=0.02)
    assert meter.decode.tokens_per_s() == pytest.approx(50.0)
    assert meter.decode_tokens_per_s() == pytest.approx(10 / WINDOW_S)
    clock.now_s += 3600.0
    assert meter.decode.tokens_per_s() == pytest.approx(50.0)
    assert meter.decode_tokens_per_s() == 0.0


def test_a_prompt_between_them_does_not_slow_the_pace_of_tokens(clock):
    meter = Meter(clock)
    run(meter, clock, 5, drawn=2, prompt_tokens=0, seconds=0.1)
    run(meter, clock, 1, drawn=1, prompt_tokens=600, seconds=3.0)
    run(meter, clock, 5, drawn=2, prompt_tokens=0, seconds=0.1)
    assert meter.decode.tokens_per_s() == pytest.approx(20.0)
    assert meter.prefill.tokens_per_s() == pytest.approx(200.0)


def test_pace_is_that_of_the_last_seconds(clock):
    meter = Meter(clock)
    run(meter, clock, 3, drawn=0, prompt_tokens=100, seconds=WINDOW_S)
    run(meter, clock, 1, drawn=0, prompt_tokens=1000, seconds=WINDOW_S)
    assert meter.prefill.tokens_per_s() == pytest.approx(1000 / WINDOW_S)
    assert Meter(clock).decode.tokens_per_s() == 0.0
