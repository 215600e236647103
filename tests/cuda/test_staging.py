"""Places of the staging area, and what is streamed ahead into them."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_core import cuda_core
from driving import answer_all, answer_alone, comparable
from hypothesis import given
from hypothesis import strategies as st
from test_contract import ORACLES, requests

from ftd.cuda import experts
from ftd.cuda.staging import Places
from ftd.experts import policy

MODEL = ORACLES / "qwen3_moe"


@given(
    num=st.integers(0, 12),
    layers=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=8),
)
def test_no_place_is_held_twice(num, layers):
    places, ahead = Places(num), {}
    for row, (wanted, wanted_ahead) in enumerate(layers):
        assert places.enter(row) == ahead
        staged = places.take(row, range(100, 100 + wanted))
        ahead = places.take(row + 1, range(200, 200 + wanted_ahead))
        held = [*places.enter(row).values(), *staged.values()]
        assert len(staged) == min(wanted, num - len(set(held) - set(staged.values())))
        ahead = places.take(row + 1, range(200, 200 + wanted_ahead))
        assert not set(held) & set(ahead.values())
        assert len(set(held)) + len(ahead) + places.free == num
    places.clear()
    assert places.free == num


def test_only_long_prompts_are_streamed_ahead_and_only_what_is_likely():
    values = np.array([0.5, 0.0, 0.02, 0.9], np.float32)
    assert policy.surely_used(values, 2048).tolist() == [3, 0, 2]
    assert policy.surely_used(values, 256).tolist() == [3, 0]
    assert policy.surely_used(values, 64).tolist() == []


@pytest.fixture(scope="module")
def alone():
    return answer_alone(MODEL, requests())


@pytest.mark.parametrize("slots", [0, 9])
@pytest.mark.parametrize("staging", [1, 3, 8])
def test_tokens_stay_equal(alone, monkeypatch, slots, staging):
    monkeypatch.setattr(policy, "AHEAD_FROM_TOKENS", 17)
    monkeypatch.setattr(policy, "SURE_USES", 1.0)
    with cuda_core(MODEL, slots=slots, staging=staging, max_running=4, prefill_chunk=50) as core:
        for _ in range(2):
            core.tree.clear()
            assert comparable(answer_all(core, requests())) == alone
        status = core.status()
    assert status.expert_ahead >= status.expert_ahead_unused
    assert status.expert_ahead > 0 or staging < 8  # all places may be taken by the layer itself


def test_what_comes_ahead_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(policy, "AHEAD_FROM_TOKENS", 17)
    monkeypatch.setattr(experts, "AHEAD_BYTES", 0)
    monkeypatch.setattr(experts, "AHEAD_TOKEN_BYTES", 0)
    with cuda_core(MODEL, slots=0, staging=8, max_running=4, prefill_chunk=50) as core:
        answer_all(core, requests())
        assert core.status().expert_ahead == 0
