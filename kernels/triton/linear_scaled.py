"""y = x Wᵀ + b for a dense matrix in a scaled format, accumulated in float32.

- ``_gemv_kernel``, up to eight rows: memory-bound, reads the packed bytes once; the order of a
  row's sum does not depend on the rows beside it.
- ``_dot_kernel``, more rows: tensor cores, 2*O*K flops a row; tiles are widened as they are read,
  into types that hold them exactly (``scaled.dot_type``).

Reference: ``TorchOps.linear``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..formats import PackedMatrix
from .launch import chained, let_next_start, wait_for_earlier
from .moe_prefill import tile_of
from .numbers import power_of_2
from .scaled import (
    UNIT_BYTES,
    add_products,
    dot_type,
    finish,
    load_scales,
    load_units,
    stored,
    unit_tile,
)
from .tiles import add_dot, scale_at, weights

MAX_GEMV_ROWS = 8
GEMV_ROWS, GEMV_COLUMNS = 4, 2048  # of the matrix, that a program holds at a time


@triton.jit
def _gemv_kernel(
    x, data, bias, y,
    T: tl.constexpr, M: tl.constexpr, HAS_BIAS: tl.constexpr,
    TP: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    num_units: tl.constexpr = M.units
    record = data.to(tl.int64)
    token = tl.arange(0, TP)
    o = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # int64: rows * row_bytes
    acc = tl.zeros([TP, ROWS], tl.float32)
    for first in tl.static_range(0, num_units, UNITS):
        tile = load_units(record, record, False, o, first, M, UNITS, False)
        scale = load_scales(record, record, False, o, first, M, UNITS, False)
        if first == 0:
            wait_for_earlier(CHAINED)  # the first packed bytes are on their way
        acc = add_products(acc, tile, scale, x, token, (1 << T) - 1, first, M, T, UNITS)
    acc = finish(acc, record, record, False, o, M, False)
    if HAS_BIAS:
        acc += tl.load(bias + o, mask=o < M.rows, other=0.0).to(tl.float32)[None, :]
    to = y + token[:, None] * M.rows + o[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(token < T)[:, None] & (o < M.rows)[None, :])


@triton.jit
def _dot_kernel(
    x, data, bias, y, T,
    M: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = M.columns
    record = data.to(tl.int64)
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    first_n = tl.program_id(0).to(tl.int64) * BN
    n = first_n + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    scale = scale_at(record, n, first_n, 0, M, BK)
    for start in tl.range(0, columns, BK, num_stages=STAGES):
        c = start + tl.arange(0, BK)
        a = tl.load(
            x + row[:, None] * columns + c[None, :],
            mask=(row < T)[:, None] & (c < columns)[None, :],
            other=0.0,
        )
        w = weights(record, n, scale, start, M, ALIGN, BK, DOT)
        next_scale = scale_at(record, n, first_n, start + BK, M, BK)
        acc = add_dot(acc, a.to(DOT.dtype), w, scale, M, DOT)
        scale = next_scale
    acc = finish(acc, record, record, False, n, M, False)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < M.rows, other=0.0).to(tl.float32)[None, :]
    to = y + row[:, None] * M.rows + n[None, :]
    tl.store(to, acc.to(y.dtype.element_ty), mask=(row < T)[:, None] & (n < M.rows)[None, :])


def linear_scaled(
    x: torch.Tensor,  # [T, K] act, contiguous
    weight: PackedMatrix,  # [O, K]
    bias: torch.Tensor | None,  # [O] any float
    out_dtype: torch.dtype,
) -> torch.Tensor:  # [T, O]
    T, K = x.shape
    matrix = stored(weight.layout)
    assert matrix.columns == K and x.is_contiguous(), (x.shape, x.stride(), weight.shape)
    assert weight.data.data_ptr() % UNIT_BYTES.value == 0, weight.data.data_ptr()
    y = torch.empty(T, matrix.rows, dtype=out_dtype, device=x.device)
    given = bias if bias is not None else x  # any pointer: not read
    if T == 0:
        return y
    if T <= MAX_GEMV_ROWS:
        rows, units = unit_tile(GEMV_ROWS, GEMV_COLUMNS, matrix)
        _gemv_kernel[(triton.cdiv(matrix.rows, rows),)](
            x, weight.data, given, y,
            T=T, M=matrix, HAS_BIAS=bias is not None,
            TP=power_of_2(T), ROWS=rows, UNITS=units,
            num_warps=4, **chained(x),
        )  # fmt: skip
        return y
    tile = tile_of(T, x.dtype, scaled=True)
    _dot_kernel[(triton.cdiv(matrix.rows, tile.columns), triton.cdiv(T, tile.rows))](
        x, weight.data, given, y, T,
        M=matrix, HAS_BIAS=bias is not None, ALIGN=UNIT_BYTES.value,
        BM=tile.rows, BN=tile.columns, BK=tile.inner, STAGES=tile.stages,
        DOT=dot_type(matrix, x.dtype),
        num_warps=tile.warps,
    )  # fmt: skip
    return y
