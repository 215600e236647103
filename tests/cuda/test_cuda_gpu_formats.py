"""On a GPU each family in each of its formats gives, in float32, the tokens of the CPU device."""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, comparable, engine_core
from test_contract import ORACLES, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = [
    "gpt_oss", "gpt_oss-mxfp4", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_moe-fp8", "qwen3_moe-fp8-ct", "qwen3_moe-int4-ct", "qwen3_moe-mixed",
    "qwen3_moe-mxfp4-ct", "qwen3_moe-nvfp4", "qwen3_moe-nvfp4-ct", "qwen3_moe-tied",
    "qwen3_moe-unnormalised", "qwen3_next",
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_the_cpu(name):
    from ftd.kernels.triton.ops import CudaOps

    with engine_core(ORACLES / name, device="cpu", max_running=1) as core:
        expected = comparable(answer_all(core, requests()))
    with cuda_core(ORACLES / name, slots=3, ops=CudaOps(), device="cuda:0", max_running=8) as core:
        answers = comparable(answer_all(core, requests()))
        assert core.status().expert_misses > 0
    assert {n: a[0] for n, a in answers.items()} == {n: a[0] for n, a in expected.items()}
