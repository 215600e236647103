"""The numerics contract for quantised checkpoints: batch, chunks and slots change no token."""

from __future__ import annotations

from pathlib import Path

import pytest
from driving import answer_all, engine_core, request

from ftd.engine.api import Sampling

ORACLES = Path(__file__).parents[1] / "data" / "oracles"
FORMATS = ["fp8", "fp8-ct", "nvfp4-ct", "int4-ct", "mxfp4-ct"]


def requests():
    made = []
    for i, length in enumerate([1, 17, 40, 33, 8]):
        prompt = [(7 * i + 3 * k * k) % 500 for k in range(length)]
        sampling = Sampling(temperature=0.8, seed=i, logprobs=2) if i % 2 else Sampling(0.0)
        made.append(request(f"r{i}", prompt, max_tokens=6 + 2 * i, sampling=sampling))
    return made


def answers(model: Path, **settings: int) -> dict[str, tuple]:
    with engine_core(model, **settings) as core:
        found = answer_all(core, requests())
    return {name: (a.tokens, a.logprobs, a.finish) for name, a in found.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_batches_chunks_and_slots_change_no_token(name):
    model = ORACLES / f"qwen3_moe-{name}"
    alone = answers(model, max_running=1, prefill_chunk=256)
    assert all(finish is not None for *_, finish in alone.values())
    assert answers(model, max_running=5, prefill_chunk=7) == alone
    assert answers(model, max_running=3, prefill_chunk=16, expert_slots=5) == alone
    assert answers(model, max_running=2, prefill_chunk=50, expert_slots=16) == alone
