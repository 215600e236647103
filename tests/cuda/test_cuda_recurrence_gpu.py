"""Recurrent states on a GPU: float32 tokens equal those of the CPU device, cold and resumed."""

from __future__ import annotations

import random

import pytest
import torch
from cuda_core import cuda_core
from driving import (
    answer_all,
    answer_interrupted,
    check_tokens_cold_and_resumed,
    comparable,
    engine_core,
    request,
    tokens_of,
)
from test_recurrence import (  # noqa: F401
    VOCAB,
    alone,
    check_states_at_rest,
    model,
    requests,
)

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
        check_tokens_cold_and_resumed(core, requests(), alone, least_reused=100)
        check_states_at_rest(core)


def test_interrupted_steps(model, alone):  # noqa: F811
    from ftd.kernels.triton.ops import CudaOps

    with cuda_core(
        model, slots=5, ops=CudaOps(), device="cuda:0", max_running=3, prefill_chunk=20
    ) as core:
        answers = comparable(answer_interrupted(core, requests(), seed=5))
        assert tokens_of(answers) == tokens_of(alone)
        check_states_at_rest(core)


def test_bfloat16_scores_a_prompt_as_float32_does(model):  # noqa: F811
    """The median of such differences is 0.06 on the CPU device; single ones come from routing."""
    from ftd.kernels.triton.ops import CudaOps

    draw = random.Random(3)
    ids = [draw.randrange(VOCAB) for _ in range(150)]
    one = request("scored", ids, 1, prompt_logprobs=0)
    with engine_core(model, device="cpu", max_running=1) as core:
        wanted = scores_of(answer_all(core, [one]))
    with cuda_core(
        model, slots=5, ops=CudaOps(), device="cuda:0", max_running=1, dtype=torch.bfloat16
    ) as core:
        found = scores_of(answer_all(core, [one]))
    assert (found - wanted).abs().median() < 0.15


def scores_of(answers):
    scores = answers["scored"].prompt_logprobs
    return torch.tensor([score.logprob for score in scores if score])
