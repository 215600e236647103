"""The router's choice: softmax over the experts' logits, the K largest, weights normalised or not.

One program a row; reads E logits. K rounds of "largest, of equal ones the lowest id", so that the
choice is that of a stable sort. E <= 1024. Reference: ``ComposedOps.route``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import chained, let_next_start, prefetch, wait_for_earlier
from .numbers import power_of_2

MAX_EXPERTS = 1024
LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def chosen_by(
    logits, E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Experts and weights [KP] of a row whose E logits lie there."""
    e = tl.arange(0, EP)
    x = tl.load(logits + e, mask=e < E, other=float("-inf"))
    p = tl.exp(x - tl.max(x, axis=0))
    p = p / tl.sum(p, axis=0)
    p = tl.where(e < E, p, -1.0)  # below all others; bits of those are in order, NaN comes first
    bits = p.to(
        tl.int32, bitcast=True
    )  # as whole numbers: a reduction of a warp is one instruction
    k = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    best = tl.zeros([KP], tl.int32)
    for round in tl.static_range(K):
        most = tl.max(bits, axis=0)
        expert = tl.min(tl.where(bits == most, e, EP), axis=0)
        chosen = tl.where(k == round, expert, chosen)
        best = tl.where(k == round, most, best)
        bits = tl.where(e == expert, LEAST, bits)
    best = best.to(tl.float32, bitcast=True)
    if NORMALISE:
        best = best / tl.sum(best, axis=0)
    return chosen, best


@triton.jit
def _route_kernel(
    logits, active, ids, weights,
    E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, MASKED: tl.constexpr,
    EP: tl.constexpr, KP: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    if MASKED:
        prefetch(active + t, CHAINED)
    wait_for_earlier(CHAINED)
    used = True
    if MASKED:
        used = tl.load(active + t) != 0
    chosen, best = chosen_by(logits + t * E, E, K, NORMALISE, EP, KP)
    k = tl.arange(0, KP)
    if MASKED:
        chosen = tl.where(used, chosen, -1)
    tl.store(ids + t * K + k, chosen, mask=k < K)
    tl.store(weights + t * K + k, best, mask=k < K)


def route(
    logits: torch.Tensor,  # [T, E] float32, contiguous
    k: int,
    normalise: bool,
    active: torch.Tensor | None = None,  # [T] bool; others choose -1
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, K] int32, [T, K] float32
    T, E = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32, (logits.stride(), logits.dtype)
    assert k <= E <= MAX_EXPERTS, (k, E)
    ids = torch.empty(T, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(T, k, dtype=torch.float32, device=logits.device)
    if T:
        _route_kernel[(T,)](
            logits, active if active is not None else logits, ids, weights,
            E=E, K=k, NORMALISE=normalise, MASKED=active is not None,
            EP=power_of_2(E), KP=power_of_2(k), num_warps=1, **chained(logits),
        )  # fmt: skip
    return ids, weights
