"""The CUDA device's parts on CPU tensors, for experts in scaled formats, with biases, clamped."""

from __future__ import annotations

import pytest
from cuda_core import cuda_core
from driving import answer_all, answer_alone, comparable
from test_contract import ORACLES, requests


@pytest.mark.parametrize("name", ["qwen3_moe-mixed", "gpt_oss-mxfp4"])
def test_resident_and_offloaded_give_the_tokens_of_the_cpu_device(name):
    some = requests()[:8]
    alone = answer_alone(ORACLES / name, some)
    for slots in (0, 5):
        with cuda_core(ORACLES / name, slots=slots, max_running=4, prefill_chunk=50) as core:
            assert comparable(answer_all(core, some)) == alone
            assert core.status().expert_misses > 0
    with cuda_core(ORACLES / name, slots=None, max_running=4) as core:
        assert core.experts.all_resident
        assert comparable(answer_all(core, some)) == alone
