"""Tiles of weights in any format for products on tensor cores: where plain and scaled ones meet."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import matrix
from .scaled import FP8, load_tile, tile_scale


@triton.jit
def weights(record, n, scale, start, M: tl.constexpr, ALIGN: tl.constexpr, BK: tl.constexpr,
            DOT: tl.constexpr):  # fmt: skip
    """Columns start .. start + BK - 1 of the rows ``n`` [BN]: [BK, BN] of the dot's type."""
    if M.scaled:
        w = load_tile(record, n, scale, start // M.unit, M, BK // M.unit, DOT.dtype)
    else:
        c = start + tl.arange(0, BK)
        numbers = matrix(record + M.numbers, M.dtype, ALIGN)
        inside = (c < M.columns)[:, None] & (n < M.rows)[None, :]
        w = tl.load(numbers + n[None, :] * M.columns + c[:, None], mask=inside, other=0.0)
        w = w.to(DOT.dtype)
    return w


@triton.jit
def scale_at(record, n, first_n, start, M: tl.constexpr, BK: tl.constexpr):
    """What ``weights`` and ``add_dot`` need of a scaled format at ``start``."""
    scale = 0.0
    if M.scaled:
        scale = tile_scale(record, n, first_n, start // M.unit, M, BK // M.unit)
    return scale


@triton.jit
def add_dot(acc, a, w, scale, M: tl.constexpr, DOT: tl.constexpr):
    """``acc`` [BM, BN] plus a [BM, BK] times w [BK, BN], times the scale of fp8's tile."""
    if M.kind == FP8:
        acc += tl.dot(a, w, input_precision=DOT.precision) * scale
    else:
        acc = tl.dot(a, w, acc, input_precision=DOT.precision)
    return acc
