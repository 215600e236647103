"""The sampler against transformers' logits processors, and at the ends of every range."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.engine import sampling as sampling_module
from ftd.engine.api import Sampling
from ftd.engine.sampling import Draw, Sampler, SamplingState, token_logprob
from ftd.errors import ConstraintFailed, EngineFailed

V = 300
SAMPLER = Sampler(V)


def random_logits(rows=1, vocab=V, seed=0, spread=3.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(draws):
    assert all(isinstance(draw, Draw) for draw in draws), draws
    return [draw.token for draw in draws]


class Fixed:
    """A constraint that allows the same all the time."""

    def __init__(self, mask):
        self._mask = mask

    def mask(self):
        return self._mask

    def accept(self, token):
        pass


def draw_one(logits, sampling, *, position=5, prompt=(), output=(), mask=None):
    state = SamplingState(sampling, prompt, None if mask is None else Fixed(mask))
    for token in output:
        state.add(token)
    return SAMPLER.sample(logits.view(1, -1), [state], [position])[0]


def distribution(logits, sampling, monkeypatch, *, points=400, **kwargs):
    """What evenly spread uniform numbers pick: the sampler's distribution, in vocabulary order."""
    picked = []
    for i in range(points):
        monkeypatch.setattr(sampling_module, "uniform", lambda *_, u=(i + 0.5) / points: u)
        picked.append(draw_one(logits, sampling, **kwargs).token)
    return picked


def expected(scores, points=400):
    """The same by hand: (token, may a rounding error move it to a neighbour)."""
    mass = scores.flatten().double().softmax(0).cumsum(0)
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    picked = torch.searchsorted(mass, u, right=True)
    near_border = (mass[:, None] - u).abs().min(0).values < 1e-5
    return list(zip(picked.tolist(), near_border.tolist()))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(temperature=30.0),
        Sampling(top_k=1),
        Sampling(top_k=20),
        Sampling(top_k=299, temperature=8.0),
        Sampling(top_k=10**12),
        Sampling(top_p=0.9),
        Sampling(top_p=0.05),
        Sampling(top_p=0.999, temperature=5.0),
        Sampling(top_p=0.99, temperature=100.0),
        Sampling(min_p=0.1),
        Sampling(min_p=1.0),
        Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02),
        Sampling(temperature=4.0, top_k=100, top_p=0.9, min_p=0.3),
        Sampling(temperature=2.0, top_k=100, top_p=0.95, min_p=0.01, repetition_penalty=1.3),
        Sampling(repetition_penalty=0.7),
    ],
    ids=str,
)
def test_distribution_is_that_of_transformers(sampling, monkeypatch):
    hf = pytest.importorskip("transformers.generation.logits_process")
    prompt, output = [1, 1, 5, 299], [7, 5, 7]
    logits = random_logits()
    chain = [hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)]
    chain.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(hf.MinPLogitsWarper(sampling.min_p))
    scores = logits.clone()
    for process in chain:
        scores = process(torch.tensor([prompt + output]), scores)
    ours = distribution(logits, sampling, monkeypatch, prompt=prompt, output=output)
    for token, (theirs, near_border) in zip(ours, expected(scores)):
        assert token == theirs or near_border


def test_presence_and_frequency_count_the_output_only(monkeypatch):
    logits = random_logits(seed=1)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=-0.25)
    scores = logits.clone()
    scores[0, 7] -= 0.5 - 0.25 * 3
    scores[0, 9] -= 0.5 - 0.25
    ours = distribution(logits, sampling, monkeypatch, prompt=[3, 4, 7], output=[7, 9, 7, 7])
    assert all(t == e or near for t, (e, near) in zip(ours, expected(scores)))


def test_bias_comes_before_penalties_and_penalties_before_temperature():
    logits = torch.zeros(V)
    logits[10] = 4.0
    logits[20] = 3.0
    bias = ((20, 2.0),)
    assert draw_one(logits, Sampling(temperature=0, logit_bias=bias)).token == 20
    # (3 + 2) / 2 < 4: the penalty sees the biased logit
    penalised = Sampling(temperature=0, logit_bias=bias, repetition_penalty=2.0)
    assert draw_one(logits, penalised, prompt=[20]).token == 10
    assert draw_one(logits, penalised, output=[20]).token == 10
    banned = Sampling(temperature=1e-9, logit_bias=((10, -100.0),))
    assert draw_one(logits, banned).token == 20
    assert logits[20] == 3.0  # the caller's logits are as they were


def test_counts_grow_with_the_output():
    sampling = Sampling(temperature=0, frequency_penalty=1.0)
    state = SamplingState(sampling, [])
    logits = torch.zeros(1, V)
    drawn = [tokens(SAMPLER.sample(logits, [state], [i]))[0] for i in range(2 * V)]
    assert drawn == [*range(V), *range(V)]  # each once, then each a second time


def test_temperature_0_takes_the_first_of_the_largest():
    logits = torch.zeros(3, V)
    logits[1, 100] = logits[1, 200] = 1.0
    logits[2, V - 1] = 1.0
    states = [SamplingState(Sampling(temperature=0), []) for _ in range(3)]
    assert tokens(SAMPLER.sample(logits, states, [0, 0, 0])) == [0, 100, V - 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-9, 1e-3])
def test_the_coldest_temperatures_are_greedy(temperature):
    logits = random_logits(rows=20, seed=2)
    states = [SamplingState(Sampling(temperature=temperature, seed=i), []) for i in range(20)]
    assert tokens(SAMPLER.sample(logits, states, range(20))) == logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [1e9, 1e38, 1e300])
@pytest.mark.parametrize("warp", [{}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": V - 1}])
def test_the_hottest_temperatures_are_even(temperature, warp):
    logits = random_logits(seed=3)
    sampling = Sampling(temperature=temperature, seed=11, **warp)
    state = SamplingState(sampling, [])
    drawn = [tokens(SAMPLER.sample(logits, [state], [i]))[0] for i in range(500)]
    assert len(set(drawn)) > 130  # top_p leaves half of them
    assert abs(sum(drawn) / 500 - V / 2) < 25


@pytest.mark.parametrize(
    "sampling",
    [Sampling(top_p=0.0), Sampling(top_p=1e-12), Sampling(top_k=1), Sampling(min_p=1.0)],
    ids=str,
)
def test_ranges_of_one_token_are_greedy(sampling):
    logits = random_logits(seed=4)
    assert draw_one(logits, sampling).token == logits.argmax()


@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=40),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, 1e12),
        top_k=st.integers(0, 50),
        top_p=st.floats(0, 1),
        min_p=st.floats(0, 1),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.01, 10),
        seed=st.integers(-(2**63), 2**64 - 1),
    ),
)
@settings(max_examples=200, deadline=None)
def test_no_combination_fails_or_leaves_the_vocabulary(logits, sampling):
    row = torch.tensor([logits])
    state = SamplingState(sampling, [0])
    (token,) = tokens(Sampler(row.shape[1]).sample(row, [state], [3]))
    assert 0 <= token < row.shape[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad):
    logits = random_logits(rows=3, seed=5)
    sampling = Sampling(seed=1, logprobs=2)
    whole = SAMPLER.sample(logits, [SamplingState(sampling, []) for _ in range(3)], [1, 2, 3])
    logits[1, 17] = bad
    draws = SAMPLER.sample(logits, [SamplingState(sampling, []) for _ in range(3)], [1, 2, 3])
    assert isinstance(draws[1], EngineFailed)
    assert "1 of the model's 300 logits at position 2" in draws[1].message
    assert (draws[0], draws[2]) == (whole[0], whole[2])


def test_a_draw_does_not_depend_on_its_row_or_neighbours():
    logits = random_logits(rows=8, seed=6)
    params = [
        Sampling(seed=1),
        Sampling(temperature=0),
        Sampling(seed=2, top_p=0.9),
        Sampling(seed=3, top_k=5, frequency_penalty=0.5),
        Sampling(seed=4, min_p=0.1, logprobs=20),
        Sampling(temperature=0, repetition_penalty=1.5),
        Sampling(seed=2**64 - 1, temperature=1e9),
        Sampling(seed=-5, logit_bias=((3, 5.0),)),
    ]
    positions = range(100, 108)
    alone = [draw_one(logits[i], p, position=positions[i]) for i, p in enumerate(params)]
    for order in (range(8), [7, 2, 5, 0, 1, 3, 6, 4]):
        states = [SamplingState(params[i], []) for i in order]
        draws = SAMPLER.sample(logits[list(order)], states, [positions[i] for i in order])
        assert draws == [alone[i] for i in order]


def test_the_same_seed_draws_the_same_and_others_differ():
    logits = random_logits(seed=7)

    def answer(seed):
        return [draw_one(logits, Sampling(seed=seed), position=i).token for i in range(20)]

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)
    assert answer(None) != answer(None)


def test_frequencies_are_the_probabilities():
    logits = random_logits(seed=8, vocab=V, spread=2.0)
    state = SamplingState(Sampling(seed=3, top_k=6), [])
    drawn = [tokens(SAMPLER.sample(logits, [state], [i]))[0] for i in range(3000)]
    values, ids = logits[0].topk(6)
    for p, token in zip(values.softmax(0).tolist(), ids.tolist()):
        assert abs(drawn.count(token) - 3000 * p) < 5 * math.sqrt(3000 * p * (1 - p))


def test_a_mask_allows_only_its_tokens():
    logits = random_logits(seed=9)
    allowed = [0, 31, 32, 298]
    words = [0] * math.ceil(V / 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    mask = torch.tensor(words, dtype=torch.int64).to(torch.int32)
    best = max(allowed, key=lambda token: float(logits[0, token]))
    assert draw_one(logits, Sampling(temperature=0), mask=mask).token == best
    drawn = {
        draw_one(logits, Sampling(seed=i, temperature=9.0), mask=mask).token for i in range(99)
    }
    assert drawn == set(allowed)
    assert draw_one(logits, Sampling(temperature=1e300), mask=mask).token in allowed
    nothing = draw_one(logits, Sampling(), mask=torch.zeros_like(mask))
    assert isinstance(nothing, ConstraintFailed) and "position 5" in nothing.message


def test_logprobs_are_the_models_own():
    logits = random_logits(seed=10)
    sampling = Sampling(temperature=0.1, top_k=1, logit_bias=((42, 100.0),), logprobs=20)
    draw = draw_one(logits, sampling)
    reference = logits[0].double().log_softmax(0)
    assert draw.token == draw.logprob.token == 42
    assert draw.logprob.logprob == pytest.approx(float(reference[42]), abs=1e-5)
    order = reference.sort(descending=True)
    assert [i for i, _ in draw.logprob.top] == order.indices[:20].tolist()
    assert [p for _, p in draw.logprob.top] == pytest.approx(order.values[:20].tolist(), abs=1e-5)


def test_logprobs_list_equals_by_id_and_end_with_the_vocabulary():
    top = token_logprob(torch.zeros(4), 2, 20).top
    assert [i for i, _ in top] == [0, 1, 2, 3]
    assert [p for _, p in top] == pytest.approx([-math.log(4)] * 4)
    assert token_logprob(torch.zeros(4), 2, 0).top == ()


def test_a_cut_far_from_the_peak_is_found_in_the_whole_vocabulary(monkeypatch):
    logits = torch.full((V,), -13.0)  # 13 nats behind the peak: not among the first candidates
    logits[50] = 0.0
    assert 0.9990 < float(logits.softmax(0)[50]) < 0.9999
    monkeypatch.setattr(sampling_module, "uniform", lambda *_: 1 - 1e-7)
    assert draw_one(logits, Sampling(top_p=0.999)).token == 50
    assert draw_one(logits, Sampling(top_p=0.9999)).token == V - 1
    assert draw_one(logits, Sampling(top_k=2)).token == V - 1  # as likely as the second
