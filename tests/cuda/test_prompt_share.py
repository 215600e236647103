"""What the CPU takes of a prompt's layer, and what a pause for other steps costs that layer."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, answer_alone, comparable
from hypothesis import given
from hypothesis import strategies as st
from test_contract import ORACLES, requests

from ftd.cuda.prompt_share import Busy, Products, PromptShare
from ftd.experts.split import PromptRates
from ftd.kernels import blocks
from ftd.kernels.activation import SILU
from ftd.kernels.cpu import native
from ftd.kernels.formats import FORMATS, expert_layout
from ftd.schedule.pauses import Pauses

MODEL = ORACLES / "qwen3_moe"

needs_cpu_kernels = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason="the C++ kernels are not built"
)


@pytest.fixture
def often(monkeypatch):
    """Up to three steps are due at half of the looks, whatever the time."""
    rng = random.Random(3)
    monkeypatch.setattr(Pauses, "due", lambda self, now_s, decode_s: rng.choice((0, 0, 0, 1, 2, 3)))


def share(rates: PromptRates | None) -> PromptShare:
    """One that only chooses."""
    layout = expert_layout(FORMATS["bf16"], 64, 64)
    address = torch.zeros(1, 4, dtype=torch.int64)
    chooses = PromptShare(None, address, layout, SILU, torch.float32, torch.device("cpu"))
    chooses.rates, chooses._fixed_s = rates, 1e-3
    return chooses


@given(
    tokens=st.lists(st.integers(1, 40), max_size=90).map(sorted),
    pause_s=st.floats(0, 2e-2),
    cpu_s=st.floats(5e-5, 4e-4),
    on_link=st.integers(0, 20),
)
def test_the_cpu_takes_less_the_longer_a_pause_keeps_it_and_the_link_goes_on(
    tokens, pause_s, cpu_s, on_link
):
    chooses, missed = share(PromptRates(1.84e-4, cpu_s, 1e-5)), range(100, 100 + len(tokens))
    whole, _ = chooses.choose(missed, tokens, on_link, Busy(1e-3, 0.0))
    part, free = chooses.choose(missed, tokens, on_link, Busy(1e-3, pause_s))
    assert list(part) == list(whole[: len(part)])
    assert 0 <= free <= 1
    if pause_s + 1e-3 >= (len(tokens) + on_link) * 1.84e-4:
        assert not part


def test_what_a_pause_costs_a_layer_that_the_link_bounds():
    """100 experts: 10 ms on the link alone, all on the CPU 20."""
    tokens, rates = [1] * 100, PromptRates(1e-4, 2e-4, 0.0)
    chooses = share(rates)
    taken, _ = chooses.choose(range(100), tokens, 0, Busy(0.0, 0.0))
    assert len(taken) == 30  # both take 7 ms
    taken, free = chooses.choose(range(100), tokens, 0, Busy(0.0, 3e-3))
    assert len(taken) == 20  # 8 ms: of 3, one is lost
    assert free == pytest.approx(2 / 3, abs=0.02)


def test_without_rates_a_pause_costs_the_pass_all_of_it():
    assert share(None).choose(range(3), [1, 1, 1], 0, Busy(0.0, 1.0)) == ((), 0.0)


@needs_cpu_kernels
def test_blocks_of_tokens_take_their_own_of_what_the_cpu_computed(monkeypatch):
    """A prompt whose tokens are more than the products of a block."""
    mine, k, hidden = 8, 2, 64  # of the oracle
    monkeypatch.setattr(blocks, "PRODUCTS_BYTES", 4 * 16 * k * hidden)
    alone = answer_alone(MODEL, requests())
    stored, store = [], Products.store

    def counted(self, y, first):
        stored.append(first)
        store(self, y, first)

    monkeypatch.setattr(Products, "store", counted)
    with cuda_core(
        MODEL, slots=mine, staging=8, fetch_of=[0, 1], max_running=12, prefill_chunk=64
    ) as core:
        core.experts.share_prompts(PromptRates(1e-2, 0.0, 0.0))
        assert comparable(answer_all(core, requests())) == alone
    assert max(stored) > 0


@needs_cpu_kernels
def test_steps_are_launched_one_behind_the_other_in_pauses(often):
    alone = answer_alone(MODEL, requests())
    with cuda_core(
        MODEL, slots=9, staging=8, fetch_of=[0, 1], max_running=12, prefill_chunk=32
    ) as core:
        core.experts.share_prompts(PromptRates(1e-2, 0.0, 0.0))
        core.experts.split([[0, 1]] * 4, [[0, 0]] * 4)
        follow, followed = core.runner.follow, []

        def counted(*args):
            followed.append(any(core.in_prefill(key) for key in core.roster.running))
            table = core.experts.division.shared.fetch_of
            assert bool(table.any()) != followed[-1], "in pauses all misses are the CPU's"
            return follow(*args)

        core.runner.follow = counted
        arrive = {one.request_id: 2 * i for i, one in enumerate(requests())}
        assert comparable(answer_all(core, requests(), arrive=arrive)) == alone
    assert sum(followed) > 5
