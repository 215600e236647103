"""On a GPU, each family and format against transformers in float32, and bfloat16 against that."""

from __future__ import annotations

import pytest
import torch
from against_oracle import Run, check_close_on_gpu, check_prompt, closeness, run_of
from lone_model import LoneModel
from oracle_check import Oracle, Prompt
from test_contract import ORACLES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = sorted(path.name for path in ORACLES.iterdir() if (path / "expected.json").exists())
WAYS = {
    "prefill": lambda length: [],
    "decode": lambda length: [1] * length,
    "chunks": lambda length: [5, 1, 2, 19, 16, 2, 33, 1],
}


def model_of(name: str, dtype: torch.dtype) -> LoneModel:
    from ftd.kernels.triton.ops import CudaOps

    return LoneModel(ORACLES / name, CudaOps(), dtype, device="cuda:0")


@pytest.mark.parametrize("name", NAMES)
def test_float32_computes_what_transformers_does(name):
    oracle, model = Oracle(ORACLES / name), model_of(name, torch.float32)
    for prompt in oracle.prompts:
        for way in WAYS.values():
            check_prompt(oracle, prompt, model, way(len(prompt.sequence)))
        oracle.check_greedy(prompt, model.greedy(prompt.ids, 32))


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_close_to_float32(name):
    exact, fast = model_of(name, torch.float32), model_of(name, torch.bfloat16)

    def run(model: LoneModel, prompt: Prompt) -> Run:
        return run_of(model, prompt, WAYS["chunks"](len(prompt.sequence)))

    found = closeness(
        Oracle(ORACLES / name).prompts, lambda p: run(fast, p), lambda p: run(exact, p)
    )
    print(f"{name}: {found}")
    check_close_on_gpu(found)
