"""What the device draws is what ``ftd.engine.sampling`` draws, for anything a request can ask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.cuda.sampling import MOST_ROWS, RowSampler, SamplerMemory
from ftd.engine.api import Sampling
from ftd.engine.device_draws import RowDraws
from ftd.engine.sampling import Draw, Sampler, SamplingState
from ftd.errors import ConstraintFailed, EngineFailed
from ftd.kernels.sample import Drawn

V = 300
CPU = torch.device("cpu")


class Fixed:
    """A constraint that allows the same all the time, or fails."""

    def __init__(self, words=None):
        self._words = words

    def mask(self):
        if self._words is None:
            raise ValueError("lost")
        return torch.tensor(self._words, dtype=torch.int32)

    def accept(self, token):
        pass


class Device:
    """Draws for up to eight rows, as a step does."""

    def __init__(self, vocab=V):
        self.memory = SamplerMemory(vocab, CPU)
        self.samplers = {n: RowSampler(n, self.memory) for n in (1, 4, 8)}

    def launch(self, logits, states, positions, *, place=True):
        draws = RowDraws(states, positions)
        if place:
            self.memory.place(draws.keeping())
        batch = next(n for n in self.samplers if n >= len(states))
        padded = torch.zeros(batch, logits.shape[1])
        padded[: len(logits)] = logits
        sampler = self.samplers[batch]
        sampler.launch(padded, draws.rows(self.memory))
        return draws, Drawn(sampler.drawn.block.clone())

    def sample(self, logits, states, positions):
        draws, drawn = self.launch(logits, states, positions)
        return draws.take(drawn.block, logits.shape[1])


def told(draw):
    return draw if isinstance(draw, Draw) else (type(draw), str(draw))


def both(make_states, logits, steps=1):
    """Draws of the CPU and of the device, each with states of its own."""
    found = []
    for sample in (Sampler(logits.shape[1]).sample, Device(logits.shape[1]).sample):
        states = make_states()
        drawn = []
        for step in range(steps):
            drawn += sample(logits.roll(step, 1), states, [step + 3] * len(states))
        found.append([told(draw) for draw in drawn])
    return found


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7, 1e-300, 1e12]),
    top_k=st.sampled_from([0, 1, 7, 40, 299, 10**12]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (250, -100.0))]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 5, 20]),
)


@given(rows=st.lists(samplings, min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_the_device_draws_what_the_sampler_draws(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), V, generator=generator) * 3
    mine, wanted = both(lambda: [SamplingState(s, [1, 1, 5, 299]) for s in rows], logits, steps=4)
    assert mine == wanted


def test_kernels_draw_what_the_sampler_draws():
    """Step by step, in slots that kernels keep up to date themselves."""
    kernels = pytest.importorskip("ftd.kernels.triton.sample")
    asked = [
        Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.5, seed=1),
        Sampling(temperature=0.0, repetition_penalty=1.2, logit_bias=((7, 2.0),)),
        Sampling(temperature=1.3, top_k=30, min_p=0.02, seed=2),
    ]
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(5)) * 2
    device = Device()
    device.memory.work = kernels.Work(MOST_ROWS, V, "cpu")
    mine, wanted = ([SamplingState(sampling, [4, 4, 9]) for sampling in asked] for _ in range(2))
    for step in range(4):
        found = device.sample(logits, mine, [step] * 3)
        assert found == Sampler(V).sample(logits, wanted, [step] * 3)
    assert device.memory.kept.counts[device.memory.slot_of(mine[0])].sum() == 2 * 4


def test_equal_logits():
    rows = [{"top_k": 3}, {"top_p": 0.4}, {"top_p": 0.4, "top_k": 250}, {"temperature": 0.0}]
    logits = torch.zeros(4, V)
    logits[:3, 90:100] = 1.0
    states = [Sampling(seed=i, **row) for i, row in enumerate(rows)]
    mine, wanted = both(lambda: [SamplingState(s, ()) for s in states], logits, steps=20)
    assert mine == wanted


def test_masks_and_rows_that_fail_alone():
    words = [0] * math.ceil(V / 32)
    words[2] = 0b1011
    constraints = [Fixed(words), None, Fixed([0] * 12), Fixed(), None, Fixed([*words, 7, 7])]
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(1))
    logits[4, 7] = math.nan
    logits[4, 9] = math.inf
    sampling = Sampling(seed=1, logprobs=1)

    def states():
        return [SamplingState(sampling, (), constraint) for constraint in constraints]

    mine, wanted = both(states, logits)
    assert mine == wanted
    failed = [None, None, ConstraintFailed, ConstraintFailed, EngineFailed, None]
    for draw, error in zip(mine, failed, strict=True):
        assert isinstance(draw, Draw) if error is None else draw[0] is error
    assert "2 of the model's 300 logits" in mine[4][1]


def test_the_device_counts_tokens_that_the_host_has_not_read():
    sampling = Sampling(temperature=0, frequency_penalty=1.0)
    device, state = Device(), SamplingState(sampling, ())
    logits = torch.zeros(1, V)
    pending = [device.launch(logits, [state], [0])]
    pending += [device.launch(logits, [state], [i], place=False) for i in range(1, 5)]
    tokens = [draws.take(drawn.block, V)[0].token for draws, drawn in pending]
    assert tokens == [0, 1, 2, 3, 4]
    assert device.sample(logits, [state], [5])[0].token == 5


@pytest.mark.parametrize("forgotten", [0, 1])
def test_slots_change_hands_and_are_written_anew(forgotten):
    """More sequences than slots, in turn; and one that the host has drawn from elsewhere."""
    device = Device()
    sampling = Sampling(temperature=0, presence_penalty=5.0)
    states = [SamplingState(sampling, ()) for _ in range(MOST_ROWS + 2)]
    logits = torch.arange(V).flip(0).float()[None] / 1000
    for turn in range(3):
        for state in states:
            assert device.sample(logits, [state], [turn])[0].token == turn + forgotten * turn
            for _ in range(forgotten):
                state.add(2 * turn + 1)
    assert device.memory.slot_of(states[0]) is None
    assert device.memory.slot_of(states[-1]) is not None


def test_a_sequence_keeps_its_slot_in_other_batches():
    device = Device()
    states = [SamplingState(Sampling(temperature=0, presence_penalty=5.0), ()) for _ in range(6)]
    logits = torch.zeros(1, V)
    assert [d.token for d in device.sample(logits.expand(6, -1), states, [0] * 6)] == [0] * 6
    slot = device.memory.slot_of(states[5])
    assert device.sample(logits, states[5:], [1])[0].token == 1
    assert device.memory.slot_of(states[5]) == slot
