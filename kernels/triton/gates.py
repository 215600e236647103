"""Results weighted by a sigmoid: one launch where torch would need five.

- ``sigmoid_mul``: x · sigmoid(gate), each number by its own gate: of attention's heads.
- ``add_gated``: total + x · sigmoid(gate), a row by one gate: of the shared expert.

In float32 until the result is rounded. Reference: ``ComposedOps``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import chained, let_next_start, wait_for_earlier
from .numbers import power_of_2

COLUMNS = 1024  # that a program of ``add_gated`` takes


@triton.jit
def _sigmoid_mul_kernel(
    x, gate, y, row_stride, head_stride,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = (t * N + n) * D + d
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + t * row_stride + n * head_stride + d, mask=inside, other=0.0)
    weighted = wide / (1.0 + tl.exp(-g.to(tl.float32)))
    tl.store(y + at, weighted.to(y.dtype.element_ty), mask=inside)


def sigmoid_mul(
    x: torch.Tensor,  # [T, N, D] act, contiguous
    gate: torch.Tensor,  # [T, N, D] act, a head's numbers side by side
) -> torch.Tensor:  # [T, N, D] act
    T, N, D = x.shape
    assert x.is_contiguous() and gate.shape == x.shape and gate.stride(2) == 1, gate.stride()
    y = torch.empty_like(x)
    if T:
        _sigmoid_mul_kernel[(T, N)](
            x, gate, y, gate.stride(0), gate.stride(1), N=N, D=D, BLOCK=power_of_2(D), num_warps=1,
            **chained(x),
        )  # fmt: skip
    return y


@triton.jit
def _add_gated_kernel(
    total, x, gate, y, H: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = h < H
    weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + t)))
    y_row = tl.load(total + t * H + h, mask=inside, other=0.0)
    y_row += tl.load(x + t * H + h, mask=inside, other=0.0) * weight
    tl.store(y + t * H + h, y_row, mask=inside)


def add_gated(
    total: torch.Tensor,  # [T, H] float32, contiguous
    x: torch.Tensor,  # [T, H] float32, contiguous
    gate: torch.Tensor,  # [T, 1] float32, contiguous
) -> torch.Tensor:  # [T, H] float32
    T, H = x.shape
    assert total.shape == x.shape and gate.shape == (T, 1), (total.shape, gate.shape)
    assert all(a.is_contiguous() and a.dtype == torch.float32 for a in (total, x, gate))
    y = torch.empty_like(total)
    if T:
        block = min(COLUMNS, power_of_2(H))
        _add_gated_kernel[(T, triton.cdiv(H, block))](
            total, x, gate, y, H=H, BLOCK=block, num_warps=4, **chained(x)
        )
    return y
