"""The gated delta net: a layer that mixes along the sequence through a state of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ftd.kernels.delta import DeltaWeights
from ftd.kernels.ops import Ops

from .layers import Joined, Linear, Pass


@dataclass(slots=True, eq=False)
class Reordered:
    """A matrix whose results are wanted in another order than its rows have."""

    linear: Linear
    order: torch.Tensor  # [O] int64: which row comes where

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, self.order]


Projection = Linear | Joined | Reordered


def reordered(linear: Linear, order: torch.Tensor) -> Projection:
    """Once and for all, where rows can be moved: in a packed matrix they may share scales."""
    if not isinstance(linear.weight, torch.Tensor):
        return Reordered(linear, order)
    assert linear.bias is None, "the bias would stay as it is"
    return Linear(linear.ops, linear.weight[order], None, linear.out_dtype)


@dataclass(slots=True, eq=False)
class DeltaNet:
    """out(norm(delta rule of convolved q, k, v) · silu(z)): see ``Ops.delta``."""

    ops: Ops
    layer: int  # of the state cache
    qkvz: Projection  # to all q heads, then k, v and z
    ba: Projection  # float32 out
    weights: DeltaWeights
    out: Linear

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        states = run.kv.states
        assert states is not None, "the KV cache has no states"
        layer = states.layers[self.layer]
        qkv, z = self.qkvz(x).tensor_split((self.weights.conv.shape[1],), dim=1)
        b, a = self.ba(x).chunk(2, dim=1)
        return self.out(self.ops.delta(qkv, z, b, a, self.weights, layer, run.step.states))
