"""The gated delta net: a layer that mixes along the sequence through a state of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ftd.kernels.delta import DeltaWeights
from ftd.kernels.ops import Ops

from .layers import Linear, Pass
from .spec import DeltaSpec


class Projection(Protocol):
    def __call__(self, x: torch.Tensor) -> Projected: ...


class Projected(NamedTuple):
    qkv: torch.Tensor  # [T, C] act: all q heads, then k, then v
    z: torch.Tensor  # [T, NV DV] act
    b: torch.Tensor  # [T, NV] float32
    a: torch.Tensor  # [T, NV] float32


@dataclass(slots=True, eq=False)
class SplitProjection:
    """A matrix for each part."""

    qkv: Linear
    z: Linear
    b: Linear
    a: Linear

    def __call__(self, x: torch.Tensor) -> Projected:
        return Projected(self.qkv(x), self.z(x), self.b(x), self.a(x))


@dataclass(slots=True, eq=False)
class GroupedProjection:
    """Two matrices whose rows are grouped by key head: its q, its k, v and z of those it serves."""

    spec: DeltaSpec
    qkvz: Linear
    ba: Linear

    def __call__(self, x: torch.Tensor) -> Projected:
        spec, T = self.spec, len(x)
        values = spec.num_value_heads // spec.num_key_heads * spec.value_dim
        groups = self.qkvz(x).view(T, spec.num_key_heads, -1)
        q, k, v, z = groups.split((spec.key_dim, spec.key_dim, values, values), dim=2)
        b, a = self.ba(x).view(T, spec.num_key_heads, -1).chunk(2, dim=2)
        qkv = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)
        return Projected(qkv, z.flatten(1), b.flatten(1), a.flatten(1))


@dataclass(slots=True, eq=False)
class DeltaNet:
    """out(norm(delta rule of convolved q, k, v) · silu(z)): see ``Ops.delta``."""

    ops: Ops
    layer: int  # of the state cache
    project: Projection
    weights: DeltaWeights
    out: Linear

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        states = run.kv.states
        assert states is not None, "the KV cache has no states"
        layer = states.layers[self.layer]
        return self.out(self.ops.delta(*self.project(x), self.weights, layer, run.step.states))
