"""The device's sampler in triton's interpreter against its torch reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from ftd.kernels import sample as rules
from ftd.kernels.sample import Drawn, Kept, RowNumbers, Rows, Shapes, mask_words, sample_ref
from ftd.kernels.triton import sample as kernels

PLAIN = Shapes()
V = 900  # two blocks, the last one short


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 512)
    monkeypatch.setattr(kernels, "PART", 256)


def both(logits, numbers, uniforms, *, prepare=lambda kept, mask: None, shapes=PLAIN):
    """What the reference draws and what kernels draw, and the counts that they leave."""
    found = []
    B, vocab = logits.shape
    rows = Rows(B)
    for b, (n, u) in enumerate(zip(numbers, uniforms, strict=True)):
        rows.set(b, n, u)
        shapes |= n.shapes
    for with_kernels in (False, True):
        kept, mask = Kept(4, vocab, "cpu"), torch.zeros(B, mask_words(vocab), dtype=torch.int32)
        torch.manual_seed(7)
        prepare(kept, mask)
        out, ids = Drawn.empty(B, "cpu"), torch.full((B,), -7)
        if with_kernels:
            work = kernels.Work(8, vocab, "cpu")
            for name in ("x", "sums"):
                getattr(work, name).fill_(float("nan"))
            for name in ("best", "bad", "measures", "known", "mass", "ranked"):
                getattr(work, name).fill_(-(1 << 30))
            kernels.sample(logits, rows, kept, mask, out, ids, work, shapes)
            assert ids.equal(out.tokens[:B].where(out.tokens[:B] >= 0, ids))
            assert (ids >= 0).all() and (ids < vocab).all()
        else:
            sample_ref(logits, rows, kept, mask, out)
        found.append((out, kept.counts))
    return found


def assert_same(found):
    (wanted, wanted_counts), (mine, counts) = found
    assert mine.tokens.tolist() == wanted.tokens.tolist()
    assert mine.bad.tolist() == wanted.bad.tolist()
    assert counts.equal(wanted_counts)
    torch.testing.assert_close(mine.logprob, wanted.logprob, rtol=1e-5, atol=1e-5)
    assert mine.top.equal(wanted.top)
    torch.testing.assert_close(mine.top_logprobs, wanted.top_logprobs, rtol=1e-5, atol=1e-5)


def random(rows, vocab=V, spread=3.0, seed=0):
    torch.manual_seed(seed)
    return torch.randn(rows, vocab) * spread


@pytest.mark.parametrize("shapes", [Shapes(), Shapes(full=True)])
@pytest.mark.parametrize("vocab", [1, 33, 512, V])
def test_temperature_alone(vocab, shapes):
    temperatures = [0.0, 0.3, 1.0, 1e-30, 1e30, 2.5]
    numbers = [RowNumbers(temperature=t) for t in temperatures]
    uniforms = [0.5, 0.01, 0.99, 0.3, 0.7, 1 - 2**-33]
    assert_same(both(random(6, vocab), numbers, uniforms, shapes=shapes))


SHAPES = [
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": V - 1},
    {"top_k": 10**12},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 1e-12},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 700, "top_p": 0.95},
]


def test_what_no_row_asks_for_is_not_searched():
    """Rows with top_k and rows with top_p alone, and neither: min_p."""
    for shape in ({"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.1}):
        numbers = [RowNumbers(temperature=1.0, **shape), RowNumbers(temperature=2.0)]
        assert_same(both(random(2), numbers, [0.8, 0.3]))


@pytest.mark.parametrize("half", [0, 1])
def test_what_is_kept(half):
    numbers = [
        RowNumbers(temperature=(0.7, 1e30)[i % 3 == 1], **shape)
        for i, shape in enumerate(SHAPES[half::2])
    ]
    assert_same(both(random(6), numbers, [0.9] * 6))


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
    logits = torch.zeros(4, V)
    logits[:, 800:810] = 2.0
    logits[2, :] = 0.0
    logits[3, 7] = -0.0
    shapes = [{"top_k": 3}, {"top_p": 0.001}, {"top_p": 0.5}, {"top_k": 11, "min_p": 0.05}]
    numbers = [RowNumbers(temperature=1.0, **shape) for shape in shapes]
    for uniform in (0.001, 0.9999):
        assert_same(both(logits, numbers, [uniform] * 4))


def test_the_first_of_the_largest():
    logits = torch.zeros(3, V)
    logits[1, 600] = logits[1, 700] = 1.0
    logits[2, 0] = -0.0
    (_, _), (mine, _) = found = both(logits, [RowNumbers()] * 3, [0.5] * 3)
    assert_same(found)
    assert mine.tokens.tolist() == [0, 600, 0, 0]


def everything(kept, mask):
    kept.bias[1, torch.randperm(V)[:99]] = torch.randn(99) * 9
    kept.counts[1, torch.randperm(V)[:300]] = torch.randint(1, 9, (300,), dtype=torch.int32)
    kept.counts[3] = torch.randint(0, 9, (V,), dtype=torch.int32)
    mask.random_(-(2**31), 2**31 - 1)
    mask[2] = 0
    mask[2, 20] = -(2**31) + 1


def test_biases_penalties_masks_and_logprobs():
    flags = rules.BIASED | rules.PENALISED | rules.MASKED | rules.LOGPROBS
    whole = RowNumbers(1.0, 50, 0.9, 0.01, 0.5, 0.25, 1.2, flags, 1)
    numbers = [
        whole,
        dataclasses.replace(whole, temperature=0.0, slot=3),
        RowNumbers(temperature=3.0, flags=rules.MASKED | rules.LOGPROBS),
        RowNumbers(temperature=1.0, presence=-1.0, flags=rules.PENALISED, slot=2),
        RowNumbers(flags=rules.LOGPROBS),
        RowNumbers(temperature=0.8),
    ]
    assert_same(both(random(6), numbers, [0.7] * 6, prepare=everything))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_mask_that_allows_nothing_and_rows_that_are_not_finite():
    numbers = [
        RowNumbers(temperature=t, top_p=0.9, flags=rules.MASKED * m)
        for t in (0.0, 1.0)
        for m in (0, 1)
    ]
    logits = random(4)
    logits[0, 17] = float("nan")
    logits[2, V - 1] = float("inf")
    logits[2, V - 2] = float("-inf")
    (wanted, _), (mine, _) = both(logits, numbers, [0.5] * 4)
    assert mine.bad.tolist() == wanted.bad.tolist() == [1, 0, 2, 0]
    assert mine.tokens[1] == mine.tokens[3] == -1


def test_a_row_ignores_its_neighbours():
    logits = random(4)
    numbers = [RowNumbers(temperature=0.5 + b / 4, top_p=0.9) for b in range(4)]
    uniforms = [(b + 0.5) / 4 for b in range(4)]
    together = both(logits, numbers, uniforms)[1][0].tokens
    for b in (0, 3):
        alone = both(logits[b : b + 1], numbers[b : b + 1], uniforms[b : b + 1])[1][0]
        assert alone.tokens[0] == together[b]
