"""Kernels that start while the one ahead still runs compute what they compute one by one."""

from __future__ import annotations

import pytest
import torch
from cuda_core import cuda_core
from driving import answer_all, comparable
from test_contract import ORACLES, requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["qwen3_moe", "qwen3_moe-fp8", "gpt_oss-mxfp4", "qwen3_5_moe"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_no_bit_of_an_answer_changes(name, dtype, monkeypatch):
    """Tokens and log-probabilities of captured steps, of 8 rows in short prompts, then of one.

    One request at a time: which rows share a step would depend on when they come, and bits on that.
    Turn by turn: where a prompt has parted from others a state is kept the next time, so that it
    begins elsewhere, and is rounded elsewhere.
    """
    from ftd.kernels.triton import launch
    from ftd.kernels.triton.ops import CudaOps

    if not launch.can_chain(torch.device("cuda:0")):
        pytest.skip("needs a GPU whose launches can be chained")

    def answers(chained: bool) -> list[dict[str, tuple]]:
        monkeypatch.setattr(launch, "can_chain", lambda device: chained)
        with cuda_core(
            ORACLES / name, slots=None, dtype=dtype, ops=CudaOps(), device="cuda:0", max_running=1
        ) as core:
            found = []
            for _ in range(3):
                core.tree.clear()
                found.append(comparable(answer_all(core, requests())))
            return found

    assert answers(chained=True) == answers(chained=False)
