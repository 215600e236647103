"""Measuring between captured steps changes no token, and the split that follows is obeyed."""

from __future__ import annotations

import pytest
from cuda_core import cuda_core
from driving import answer_all, comparable, engine_core
from measuring import measured_while_serving
from test_contract import ORACLES, requests

from ftd.experts.measure import Effort
from ftd.kernels.cpu import native

MODEL = ORACLES / "qwen3_moe"


@pytest.mark.parametrize("slots", [0, 7])
def test_tokens_are_those_of_an_engine_that_measures_nothing(slots, monkeypatch):
    if native.unavailable_reason() is not None:
        pytest.skip("the C++ kernels are not built")
    effort = Effort((1, 4), (1, 2), rounds=1, slice_s=1e-3)
    monkeypatch.setattr("ftd.engine.profiling.FULL", effort)
    some = requests()[:5]
    with engine_core(MODEL, device="cpu", max_running=1) as core:
        expected = {name: a[0] for name, a in comparable(answer_all(core, some)).items()}
    with cuda_core(MODEL, slots=slots, fetch_of=[0, 0, 1], max_running=4) as core:
        profile, answers = measured_while_serving(core, some)
        assert {name: answer.tokens for name, answer in answers.items()} == expected
        of = core.experts.experts_per_token
        table = core.experts.division.shared.fetch_of
        for row, batch in enumerate((1, 2, 4, 8)):
            expected_table = profile.fetch_of(batch, of)[: table.shape[1]]
            assert tuple(table[row].tolist()[: len(expected_table)]) == expected_table
        again = {name: a[0] for name, a in comparable(answer_all(core, some)).items()}
        assert again == expected
        assert core.status().rates_from.startswith("the profile of")
    assert all(f.fixed_s > 0 and f.cpu.experts_per_s > 0 for f in profile.figures)
    assert (profile.figures[0].hits.experts_per_s > 0) == (slots > 0)
