"""Layers with a window on a GPU: float32 tokens equal those of the CPU device, cold and resumed."""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_interrupted, check_tokens_cold_and_resumed, comparable, tokens_of
from test_windows import alone, check_at_rest, model, requests  # noqa: F401

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("max_running", "chunk"), [(1, 256), (3, 7), (8, 50)])
def test_tokens_equal_those_of_the_cpu(model, alone, max_running, chunk, pinned):  # noqa: F811
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=5, pinned=pinned, ops=CudaOps(), device="cuda:0",
        max_running=max_running, prefill_chunk=chunk,
    ) as core:  # fmt: skip
        assert core.kv.windows is not None
        check_tokens_cold_and_resumed(core, requests(), alone, least_reused=300)
        check_at_rest(core)


def test_interrupted_steps_and_host_memory_below(model, alone):  # noqa: F811
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=5, ops=CudaOps(), device="cuda:0", max_running=3, prefill_chunk=20,
        num_pages=40, host_pages=80,
    ) as core:  # fmt: skip
        for seed in range(3):
            answers = comparable(answer_interrupted(core, requests(), seed=seed))
            assert tokens_of(answers) == tokens_of(alone)
        check_at_rest(core)
