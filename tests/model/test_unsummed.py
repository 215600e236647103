"""Experts may leave their sum to the norm behind them, and take the router's choice upon them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from lone_model import LoneModel

from ftd.kernels.reference import TorchOps
from ftd.kernels.unsummed import summed

ops = TorchOps()
asked: list[str] = []


@dataclass(frozen=True)
class Later:
    y: torch.Tensor

    def sum(self):
        asked.append("sum")
        return self.y

    def add_rms_norm(self, x, weight, eps, out_dtype):
        asked.append("norm")
        return ops.add_rms_norm(x, self.y, weight, eps, out_dtype)


class LateExperts:
    def __init__(self, experts):
        self.experts = experts

    def choose(self, layer, x, logits, k, normalise):
        asked.append("choice")
        return ops.route(logits, k, normalise)

    def forward(self, layer, x, ids, weights):
        return Later(self.experts.forward(layer, x, ids, weights))


@pytest.mark.parametrize(
    ("family", "added"),
    [("qwen3_moe", "norm"), ("qwen2_moe", "sum"), ("granitemoe", "sum")],  # shared expert, a scale
)
def test_a_model_computes_the_same(family, added, data_dir):
    tokens = [5, 3, 8, 1, 9]
    lone = LoneModel(data_dir / "oracles" / family, ops)
    want = lone.run(tokens)
    lone.experts = LateExperts(lone.experts)
    asked.clear()
    assert torch.equal(lone.run(tokens), want)
    assert {*asked} == {"choice", added} and asked.count(added) == len(lone.spec.moe_layers)


def test_a_sum_is_a_sum():
    y = torch.randn(2, 3)
    assert summed(y) is y and summed(Later(y)) is y
