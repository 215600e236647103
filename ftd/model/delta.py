"""The gated delta net: a layer that mixes along the sequence through a state of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ftd.kernels.delta import causal_conv, delta_scan
from ftd.kernels.ops import Ops
from ftd.kv.state_cache import StateCache

from .layers import Linear, Pass, RmsNorm
from .spec import DeltaSpec
from .step import StateSpan

_EPS = 1e-6  # under the root of q's and k's length, whatever the model's norms have


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
    """out(norm(delta rule of convolved q, k, v) · silu(z)).

    Rounding points: q, k, v, z and the result are act; decay, beta, the state and all sums float32.
    """

    ops: Ops
    spec: DeltaSpec
    layer: int  # of the state cache
    project: Projection
    conv: torch.Tensor  # [W, C] float32, the oldest token's first
    rate: torch.Tensor  # [NV] float64: -exp(A_log)
    bias: torch.Tensor  # [NV] float64: dt_bias
    q_unit: RmsNorm  # of each head of q, with q's scale; float32 out
    k_unit: RmsNorm
    norm: RmsNorm  # of each head's result; float32 out
    out: Linear

    def __call__(self, x: torch.Tensor, run: Pass) -> torch.Tensor:
        states = run.kv.states
        assert states is not None, "the KV cache has no states"
        spec = self.spec
        qkv, z, b, a = self.project(x)
        # in float64: torch's vector and scalar code differ in the last bit of a float32 exponential
        beta = b.double().sigmoid().float()  # [T, NV]
        decay = (self.rate * F.softplus(a.double() + self.bias)).exp().float()
        mixed = torch.empty(len(x), spec.num_value_heads, spec.value_dim)  # float32
        for span in run.step.states:
            rows = slice(span.begin, span.end)
            mixed[rows] = self._mix(qkv[rows], decay[rows], beta[rows], span, states)
        gate = F.silu(z.double()).float().view_as(mixed)
        y = (self.norm(mixed) * gate).to(x.dtype)  # [T, NV, DV]
        return self.out(y.view(len(x), -1))

    def _mix(
        self,
        qkv: torch.Tensor,  # [T, C] act: of one sequence
        decay: torch.Tensor,  # [T, NV]
        beta: torch.Tensor,
        span: StateSpan,
        states: StateCache,
    ) -> torch.Tensor:  # [T, NV, DV] float32
        tails, recurrent = states.tail[self.layer], states.recurrent[self.layer]
        before = span.source
        tail = torch.zeros_like(tails[0]) if before is None else tails[before]
        inputs = torch.cat((tail, qkv))  # [W - 1 + T, C]
        q, k, v = self._heads(causal_conv(inputs, self.conv))
        parts, row = [], 0
        for end, slot in span.targets:
            end -= span.begin
            part = slice(row, end)
            parts.append(
                delta_scan(
                    q[part],
                    k[part],
                    v[part],
                    decay[part],
                    beta[part],
                    None if before is None else recurrent[before],
                    recurrent[slot],
                )
            )
            tails[slot] = inputs[end : end + len(tail)]
            before, row = slot, end
        return torch.cat(parts)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k of unit length, q scaled, a head for each of v's: [T, NV, D] float32."""
        spec = self.spec
        keys = spec.num_key_heads * spec.key_dim
        q, k, v = qkv.split((keys, keys, spec.num_value_heads * spec.value_dim), dim=1)
        served = spec.num_value_heads // spec.num_key_heads
        q, k = (part.reshape(len(part), -1, spec.key_dim).contiguous() for part in (q, k))
        q = self.q_unit(q).repeat_interleave(served, dim=1)
        k = self.k_unit(k).repeat_interleave(served, dim=1)
        return q, k, v.float().reshape(len(v), -1, spec.value_dim).contiguous()


def unit_norm(ops: Ops, dim: int, scale: float = 1.0) -> RmsNorm:
    """Divides a head by its length: an RMS norm with the number of channels taken out."""
    return RmsNorm(ops, torch.full((dim,), scale * dim**-0.5), _EPS / dim, torch.float32)
