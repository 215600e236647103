"""Operations made of others: what the coarser ones mean, and how the CPU computes them.

A GPU has a kernel for each, because what costs there is their number.
"""

from __future__ import annotations

from typing import Any

import torch

from .delta import (
    UNIT_EPS,
    DeltaWeights,
    LayerStates,
    StateRows,
    States,
    StateSpan,
    causal_conv,
    delta_scan,
    state_views,
)


class ComposedOps:
    """The base of every ``kernels.ops.Ops`` on the CPU; see there for shapes."""

    delta_scan = staticmethod(delta_scan)

    def route(
        self: Any,
        logits: torch.Tensor,
        k: int,
        normalise: bool,
        active: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # a stable sort, as top-k promises no order among equals
        ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights = ordered[:, :k].contiguous()
        if normalise:
            weights /= weights.sum(-1, keepdim=True)
        ids = ids[:, :k].to(torch.int32)
        return ids if active is None else ids.masked_fill(~active[:, None], -1), weights

    def add_rms_norm(
        self: Any,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps, out_dtype)

    def split_heads(
        self: Any,
        qkv: torch.Tensor,
        num_heads: int,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        turn: tuple[torch.Tensor, torch.Tensor] | None,
        interleaved: bool,
        place: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
    ) -> torch.Tensor:
        kv_heads = k_pages.shape[2]
        parts = qkv.split((num_heads, kv_heads, kv_heads), dim=1)
        q, k, v = (part.contiguous() for part in parts)  # copies if T > 1
        if norms:
            q = self.rms_norm(q, norms[0], eps, qkv.dtype)
            k = self.rms_norm(k, norms[1], eps, qkv.dtype)
        if turn:
            self.rope(q, *turn, interleaved)
            self.rope(k, *turn, interleaved)
        self.write_kv(k, v, place, k_pages, v_pages)
        return q

    # In float64: torch's vector and scalar code differ in the last bit of a float32 exponential,
    # and of a cosine.

    def turns(
        self: Any, position: torch.Tensor, inv_freq: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = (position[:, None].float() * inv_freq).double()
        return (angle.cos() * scale).float(), (angle.sin() * scale).float()

    def sigmoid_mul(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x.float() * gate.double().sigmoid().float()).to(x.dtype)

    def add_gated(
        self: Any, total: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        return total + x * gate.double().sigmoid().float()

    def delta(
        self: Any,
        qkv: torch.Tensor,
        z: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        weights: DeltaWeights,
        states: LayerStates,
        at: States,
    ) -> torch.Tensor:
        beta = b.double().sigmoid().float()  # [T, NV]
        decay = (
            (weights.rate * torch.nn.functional.softplus(a.double() + weights.bias)).exp().float()
        )
        mixed = torch.zeros(len(qkv), weights.num_value_heads, weights.value_dim)
        spans, end = _spans(at), len(qkv)
        for span in spans:
            rows = slice(span.begin, span.end)
            mixed[rows] = self._scanned(qkv[rows], decay[rows], beta[rows], weights, states, span)
            end = span.end
        if not isinstance(at, StateRows):
            mixed[end:] = mixed[end - 1]
        gate = torch.nn.functional.silu(z.double()).float().reshape(mixed.shape)
        y = self.rms_norm(mixed, weights.norm, weights.norm_eps, torch.float32) * gate
        return y.to(qkv.dtype).view(len(qkv), -1)

    def _scanned(
        self: Any,
        qkv: torch.Tensor,  # [T, C] act: of one sequence
        decay: torch.Tensor,  # [T, NV]
        beta: torch.Tensor,
        weights: DeltaWeights,
        states: LayerStates,
        span: StateSpan,
    ) -> torch.Tensor:  # [T, NV, DV] float32
        past = len(weights.conv) - 1
        tail, state = torch.zeros(past, qkv.shape[1], dtype=qkv.dtype), None
        if span.source is not None:
            state, tail = state_views(states, span.source, weights, qkv.dtype)
        inputs = torch.cat((tail, qkv))  # [W - 1 + T, C]
        q, k, v = self._delta_heads(causal_conv(inputs, weights.conv), weights)
        parts, row = [], 0
        for end, slot in span.targets:
            end -= span.begin
            part = slice(row, end)
            target, tail = state_views(states, slot, weights, qkv.dtype)
            parts.append(
                self.delta_scan(q[part], k[part], v[part], decay[part], beta[part], state, target)
            )
            tail.copy_(inputs[end : end + past])
            state, row = target, end
        return torch.cat(parts)

    def _delta_heads(
        self: Any, qkv: torch.Tensor, weights: DeltaWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q and k of unit length, q scaled, a head for each of v's: [T, NV, D] float32."""
        keys, dim = weights.num_key_heads * weights.key_dim, weights.key_dim
        q, k, v = qkv.split((keys, keys, weights.num_value_heads * weights.value_dim), dim=1)
        served = weights.num_value_heads // weights.num_key_heads
        units = []
        for part, scale in ((q, dim**-0.5), (k, 1.0)):
            heads = part.reshape(len(part), -1, dim).contiguous()
            # an RMS norm with the number of channels taken out
            unit = torch.full((dim,), scale * dim**-0.5)
            unit = self.rms_norm(heads, unit, UNIT_EPS / dim, torch.float32)
            units.append(unit.repeat_interleave(served, dim=1))
        return *units, v.float().reshape(len(v), -1, weights.value_dim).contiguous()


def _spans(at: States) -> tuple[StateSpan, ...]:
    if not isinstance(at, StateRows):
        return at
    rows = enumerate(zip(at.source.tolist(), at.target.tolist()))
    return tuple(
        StateSpan(row, source if source >= 0 else None, ((row + 1, target),))
        for row, (source, target) in rows
        if target >= 0
    )
