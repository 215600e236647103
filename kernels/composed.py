"""Operations made of others: what the coarser ones mean, and how the CPU computes them.

A GPU has a kernel for each, because what costs there is their number.
"""

from __future__ import annotations

from typing import Any

import torch


class ComposedOps:
    """The base of every ``kernels.ops.Ops`` on the CPU; see there for shapes."""

    def route(
        self: Any, logits: torch.Tensor, k: int, normalise: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # a stable sort, as top-k promises no order among equals
        ordered, ids = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights = ordered[:, :k].contiguous()
        if normalise:
            weights /= weights.sum(-1, keepdim=True)
        return ids[:, :k].to(torch.int32), weights

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
