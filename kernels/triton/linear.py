"""y = x Wᵀ + b for few rows of x, accumulated in float32.

Memory-bound: reads W once, O*K numbers; x [T, K] comes from the caches. Two kernels:

- ``_gemv_kernel``: dot products on the ordinary cores, any number types. The way to go for one row,
  and for matrices so small that tiles of 16 rows of W would leave most of the GPU idle.
- ``_skinny_kernel``: tensor cores with x padded to 16 rows. Two to 16 rows cost what one costs.

No split along K and no atomics: one program owns its outputs and adds in one fixed order.
More rows are the business of cuBLAS. Reference: ``TorchOps.linear``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import LINE_BYTES, chained, let_next_start, prefetch, wait_for_earlier
from .numbers import power_of_2, wide_dot

MAX_ROWS = 16  # of x: what one tensor core tile holds
MAX_GEMV_ROWS = 8
TILE = 16384  # numbers of W that a program holds at a time: mostly all of its rows
PREFETCHED_BYTES = 32 << 20  # of a matrix: it has to stay in the L2 cache until it is used
SMALL_OUT = 1024  # with fewer outputs, 16 rows of W a program fill too few programs


@triton.jit
def _unpacked(word):
    """Two bfloat16 of each word as float32, a last axis of two: one instruction for each."""
    low = (word << 16).to(tl.float32, bitcast=True)
    return tl.join(low, (word & -65536).to(tl.float32, bitcast=True))


@triton.jit
def _gemv_kernel(
    x, weight, bias, y, O,
    T: tl.constexpr, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    if PAIRS:  # K and BLOCK_K count words
        weight = tl.multiple_of(weight.to(tl.pointer_type(tl.int32)), 16)
        x = tl.multiple_of(x.to(tl.pointer_type(tl.int32)), 16)
    rows = weight + o.to(tl.int64)[:, None] * K
    token = tl.arange(0, ROWS)
    acc = tl.zeros([ROWS, BLOCK_O], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        inside = (start + k) < K
        w = tl.load(rows + (start + k)[None, :], mask=(o < O)[:, None] & inside[None, :], other=0.0)
        if start == 0:
            wait_for_earlier(CHAINED)  # W's first columns are on their way: they depend on nothing
        if PAIRS:
            w = tl.reshape(_unpacked(w), [BLOCK_O, 2 * BLOCK_K])
        w = w.to(tl.float32)
        for t in tl.static_range(T):
            part = tl.load(x + t * K + start + k, mask=inside, other=0.0)
            if PAIRS:
                part = tl.reshape(_unpacked(part), [2 * BLOCK_K])
            product = tl.sum(w * part.to(tl.float32)[None, :], axis=1)
            acc += tl.where(token[:, None] == t, product[None, :], 0.0)
    if HAS_BIAS:
        acc += tl.load(bias + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    at = y + token.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(token < T)[:, None] & (o < O)[None, :])


@triton.jit
def _skinny_kernel(
    x, weight, bias, y, T, O,
    K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    if LINES > 0:
        begin = tl.program_id(0).to(tl.int64) * BLOCK_O * K
        size = tl.minimum(O * K - begin, BLOCK_O * K)  # of its rows of W, which lie side by side
        prefetch(weight + begin + tl.minimum(tl.arange(0, LINES) * LINE, size - 1), CHAINED)
    wait_for_earlier(CHAINED)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    token = tl.arange(0, 16)
    rows = weight + o.to(tl.int64)[None, :] * K  # a tile of Wᵀ: [BLOCK_K, BLOCK_O]
    acc = tl.zeros([16, BLOCK_O], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (start + k) < K
        part = tl.load(
            x + token[:, None] * K + (start + k)[None, :],
            mask=(token < T)[:, None] & inside[None, :],
            other=0.0,
        )
        w = tl.load(rows + (start + k)[:, None], mask=inside[:, None] & (o < O)[None, :], other=0.0)
        if WIDE:
            part = part.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(part, w, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    at = y + token.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(at, acc.to(y.dtype.element_ty), mask=(token < T)[:, None] & (o < O)[None, :])


def linear_few_rows(
    x: torch.Tensor,  # [T, K] act, contiguous, T <= MAX_ROWS
    weight: torch.Tensor,  # [O, K] any float, contiguous
    bias: torch.Tensor | None,  # [O] any float
    out_dtype: torch.dtype,
) -> torch.Tensor:  # [T, O]
    T, K = x.shape
    O = weight.shape[0]
    assert weight.shape[1] == K and T <= MAX_ROWS, (x.shape, weight.shape)
    assert x.is_contiguous() and weight.is_contiguous(), (x.stride(), weight.stride())
    y = torch.empty(T, O, dtype=out_dtype, device=x.device)
    if T == 0:
        return y
    given = bias if bias is not None else x  # any pointer: not read
    if suits_gemv(T, O, x.dtype, weight.dtype):
        block_o = gemv_block(O)
        block_k = min(TILE // block_o, power_of_2(K))
        each = 2 if in_pairs(x, weight) else 1
        _gemv_kernel[(triton.cdiv(O, block_o),)](
            x, weight, given, y, O,
            T=T, K=K // each, HAS_BIAS=bias is not None,
            BLOCK_O=block_o, BLOCK_K=block_k // each, ROWS=power_of_2(T), PAIRS=each == 2,
            num_warps=8, **chained(x),
        )  # fmt: skip
        return y
    block_o = 16 if O <= 16384 else 32
    line = LINE_BYTES // weight.element_size()
    fits = weight.numel() * weight.element_size() <= PREFETCHED_BYTES
    _skinny_kernel[(triton.cdiv(O, block_o),)](
        x, weight, given, y, T, O,
        K=K, HAS_BIAS=bias is not None,
        BLOCK_O=block_o, BLOCK_K=min(256, max(16, power_of_2(K))), STAGES=4,
        WIDE=wide_dot(x.dtype),
        LINES=power_of_2(triton.cdiv(block_o * K, line)) if fits else 0, LINE=line,
        num_warps=4, **chained(x),
    )  # fmt: skip
    return y


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``linear_few_rows`` computes this product: few rows, and a kernel for the types."""
    T = x.shape[0]
    return suits_gemv(T, weight.shape[0], x.dtype, weight.dtype) or (
        T <= MAX_ROWS and x.dtype == weight.dtype
    )


def suits_gemv(rows: int, outputs: int, act: torch.dtype, stored: torch.dtype) -> bool:
    few = rows == 1 or outputs <= SMALL_OUT or act != stored or act == torch.float32
    return rows <= MAX_GEMV_ROWS and few


def in_pairs(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether words of two numbers can be loaded, which widen in one instruction a number."""
    aligned = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    return x.dtype == weight.dtype == torch.bfloat16 and aligned


def gemv_block(outputs: int) -> int:
    """Rows of W a program: as many as still leave four programs for each of 132 processors."""
    return next(b for b in (8, 4, 2, 1) if b == 1 or triton.cdiv(outputs, b) >= 528)
