"""The numerics contract on a GPU: float32 tokens equal those of the CPU device."""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, engine_core
from test_contract import ORACLES, comparable, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe-window"])
def model(request):
    return ORACLES / request.param


@pytest.fixture(scope="module")
def tokens(model):
    with engine_core(model, device="cpu", max_running=1) as core:
        answers = comparable(answer_all(core, requests()))
    return {name: answer[0] for name, answer in answers.items()}


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("slots", [0, 7, 32])
def test_tokens_equal_those_of_the_cpu(model, tokens, slots, pinned):
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=slots, pinned=pinned, ops=CudaOps(), device="cuda:0", max_running=8
    ) as core:
        for _ in range(2):  # slots as filled at the start, then as the policy left them
            answers = comparable(answer_all(core, requests()))
            assert {name: answer[0] for name, answer in answers.items()} == tokens
        status = core.status()
    assert (status.expert_misses > 0) == (slots < 32)
