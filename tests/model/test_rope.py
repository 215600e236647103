"""Frequencies and turns against transformers' rotary embedding."""

from __future__ import annotations

import pytest
import torch

from ftd.kernels.reference import TorchOps
from ftd.model.published import Published
from ftd.model.rope import Rotary, read_rope

KINDS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-whole": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5},
}


def published(scaling):
    return {"rope_theta": 1e6, "rope_scaling": scaling, "max_position_embeddings": 4096}


@pytest.mark.parametrize("kind", KINDS)
def test_turns_match_transformers(kind):
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config = modeling.Qwen3MoeConfig(head_dim=64, **published(KINDS[kind]))
    position = torch.tensor([0, 1, 17, 300, 4095, 100_000])
    cos, sin = modeling.Qwen3MoeRotaryEmbedding(config)(torch.zeros(1), position[None])
    spec, _ = read_rope(Published(published(KINDS[kind])), 64)
    ours = Rotary(spec).at(position.int(), TorchOps())
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert mine.dtype == torch.float32 and mine.shape == (6, 32)
        torch.testing.assert_close(mine, theirs[0, :, :32], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("default", 0), ("linear", 32768), ("yarn", 2048), ("yarn-mscale", 163840)]
)
def test_says_for_how_many_tokens_a_scaling_was_made(kind, tokens):
    assert read_rope(Published(published(KINDS[kind])), 64)[1] == tokens


def test_a_row_does_not_depend_on_the_rows_beside_it():
    spec, _ = read_rope(Published(published(None)), 12)  # 6 pairs: never a whole vector
    rotary, position = Rotary(spec), torch.arange(0, 9999, 37, dtype=torch.int32)
    together = torch.stack(rotary.at(position, TorchOps()))
    alone = torch.cat([torch.stack(rotary.at(p[None], TorchOps())) for p in position], dim=1)
    assert torch.equal(together, alone)
