"""The gated delta rule on a GPU: chunks of a prompt here, one row a sequence in ``delta_step``.

Within a chunk of C rows all changes are written out at once (the WY form). With G the running sum
of the decays' logarithms, S the state before the chunk, and E_ij = exp(G_i − G_j) for i ≥ j:

    A = strictly lower part of  beta_i (k_i · k_j) E_ij;     T = (1 + A)⁻¹
    U = T (beta v);    W = T (beta exp(G) k);                P = lower part of  (q_i · k_j) E_ij
    V = U − W S;       O = (exp(G) q) S + P V;               S ← exp(G_C) S + (exp(G_C − G) k)ᵀ V

1. heads: convolution and silu of the channels, q and k to unit length; tails of wanted states;
2. chunks: G, P, U and W, each chunk and head by itself; T row by row, as powers of A cancel badly;
3. scan: V, O and S, chunk after chunk; a program for (sequence, head, columns of v);
4. norm: each head's result, times silu(z).

A chunk ends where a state is wanted, so that S is at hand there and goes to its slot at once.
Slots are found through an address table: a state is read from GPU memory or over the link by the
same instructions, and written likewise. Sums in float32; products take float32 numbers through
tensor cores, as one tf32 product for bfloat16 activations and as three for float32.

Scratch in float32, a row: C + NV (DV + DK + 64 + 1) numbers. Reference: ``TorchOps.delta``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..delta import UNIT_EPS, DeltaWeights, LayerStates, StateSpan
from .moe_decode import matrix
from .numbers import power_of_2, tl_dtype

CHUNK_ROWS = 64
SLOT_ALIGN = 16  # bytes, of each part of a slot: the widest load
COLUMNS = 32  # of the state, that a program of the scan holds: four programs a head of 128
NORM_HEADS = 8  # that a program of the norm takes


class Chunk(NamedTuple):
    """Rows ``begin`` .. ``end`` - 1 of a sequence whose first row in the step is ``first``."""

    begin: int
    end: int
    first: int
    source: int  # slot of the state before ``first``, -1: none
    target: int  # slot for the state after ``end``, -1: none is wanted


def cut(spans: tuple[StateSpan, ...]) -> tuple[list[Chunk], list[int]]:
    """Chunks that end where a state is wanted, and where each sequence's begin among them."""
    chunks: list[Chunk] = []
    starts = [0]
    for span in spans:
        source, row = -1 if span.source is None else span.source, span.begin
        for end, slot in span.targets:
            for begin in range(row, end, CHUNK_ROWS):
                last = min(begin + CHUNK_ROWS, end)
                target = slot if last == end else -1
                chunks.append(Chunk(begin, last, span.begin, source, target))
            row = end
        starts.append(len(chunks))
    return chunks, starts


@lru_cache(maxsize=2)  # every layer of a step asks for the same
def _on_device(
    spans: tuple[StateSpan, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:  # [NC, 5] int32, [B + 1] int32
    chunks, starts = cut(spans)
    numbers = torch.tensor([number for chunk in chunks for number in chunk] + starts).int()
    on_device = numbers.to(device)
    split = len(chunks) * len(Chunk._fields)
    return on_device[:split].view(len(chunks), -1), on_device[split:]


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, rate, bias):
    """rate · softplus(a + bias), exact where the exponential is tiny."""
    x = a + bias.to(tl.float32)
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    rest = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return rate.to(tl.float32) * (tl.maximum(x, 0.0) + rest)


@triton.jit
def _heads_kernel(
    qkv, conv, address, chunks, heads, stride, tail, eps,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, W: tl.constexpr,
    ACT: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * NK * DK + NV * DV
    chunk = chunks + tl.program_id(0) * 5
    head = tl.program_id(1)
    begin = tl.load(chunk)
    end = tl.load(chunk + 1)
    first = tl.load(chunk + 2)
    source = tl.load(chunk + 3)
    target = tl.load(chunk + 4)
    is_value = head >= 2 * NK
    width = tl.where(is_value, DV, DK)
    channel = tl.where(is_value, 2 * NK * DK + (head - 2 * NK) * DV, head * DK)
    d = tl.arange(0, BLOCK)
    inside = d < width
    old = matrix(tl.load(address + tl.maximum(source, 0)) + tail, ACT, ALIGN) + channel + d
    row = begin + tl.arange(0, ROWS)
    used = row < end
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(W):
        at = row - (W - 1) + i
        here = (used & (at >= first))[:, None] & inside[None, :]
        where = qkv + at.to(tl.int64)[:, None] * stride + channel
        x = tl.load(where + d[None, :], mask=here, other=0.0)
        past = (used & (at < first))[:, None] & inside[None, :] & (source >= 0)
        before = tl.load(old[None, :] + (at - first + W - 1)[:, None] * C, mask=past, other=0.0)
        tap = tl.load(conv + i * C + channel + d, mask=inside, other=0.0)
        acc += tl.where(here, x, before).to(tl.float32) * tap[None, :]
    y = silu(acc).to(ACT).to(tl.float32)
    if head < 2 * NK:
        scale = tl.rsqrt(tl.sum(y * y, axis=1) + eps)
        if head < NK:
            scale *= DK**-0.5
        y *= scale[:, None]
    to = heads + row.to(tl.int64)[:, None] * C + channel + d[None, :]
    tl.store(to, y, mask=used[:, None] & inside[None, :])
    if target >= 0:
        new = matrix(tl.load(address + target) + tail, ACT, ALIGN) + channel + d
        for i in tl.static_range(W - 1):
            of = end - (W - 1) + i
            seen = tl.load(
                qkv + of.to(tl.int64) * stride + channel + d, mask=inside & (of >= first), other=0.0
            )
            kept = tl.load(
                old + (of - first + W - 1) * C,
                mask=inside & (of < first) & (source >= 0),
                other=0.0,
            )
            tl.store(new + i * C, tl.where(of >= first, seen, kept), mask=inside)


@triton.jit
def _chunks_kernel(
    heads, b, a, rate, bias, chunks, sums, scores, fresh, lost, stride,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * NK * DK + NV * DV
    chunk = chunks + tl.program_id(0) * 5
    n = tl.program_id(1)
    begin = tl.load(chunk)
    end = tl.load(chunk + 1)
    i = tl.arange(0, ROWS)
    row = (begin + i).to(tl.int64)
    used = row < end
    gate = tl.load(a + row * stride + n, mask=used, other=0.0)
    decay = log_decay(gate, tl.load(rate + n), tl.load(bias + n))
    G = tl.cumsum(tl.where(used, decay, 0.0), axis=0)
    tl.store(sums + row * NV + n, G, mask=used)
    beta = tl.load(b + row * stride + n, mask=used, other=0.0)
    beta = tl.where(used, 1.0 / (1.0 + tl.exp(-beta)), 0.0)
    d = tl.arange(0, DKP)
    e = tl.arange(0, DVP)
    keys = used[:, None] & (d < DK)[None, :]
    values = used[:, None] & (e < DV)[None, :]
    at = heads + row[:, None] * C + n // (NV // NK) * DK + d[None, :]
    k = tl.load(at + NK * DK, mask=keys, other=0.0)
    turned = tl.trans(k)
    # Aᵀ rather than A: a column of it is a row of A, in the layout that T's rows are added in
    later = i[:, None] < i[None, :]
    between = tl.exp(tl.where(later, G[None, :] - G[:, None], 0.0))
    products = tl.dot(k, turned, input_precision=PRECISION)
    A = tl.where(later, products * between * beta[None, :], 0.0)
    T = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, end - begin):
        line = tl.sum(tl.where(i[None, :] == r, A, 0.0), axis=1)
        solved = tl.sum(line[:, None] * T, axis=0)
        T = tl.where(i[:, None] == r, T - solved[None, :], T)
    v = tl.load(
        heads + row[:, None] * C + 2 * NK * DK + n * DV + e[None, :], mask=values, other=0.0
    )
    U = tl.dot(T, v * beta[:, None], input_precision=PRECISION)
    tl.store(fresh + (row * NV + n)[:, None] * DV + e[None, :], U, mask=values)
    faded = tl.dot(T, k * (beta * tl.exp(G))[:, None], input_precision=PRECISION)
    tl.store(lost + (row * NV + n)[:, None] * DK + d[None, :], faded, mask=keys)
    q = tl.load(at, mask=keys, other=0.0)
    seen = i[:, None] >= i[None, :]
    P = tl.dot(q, turned, input_precision=PRECISION)
    P = tl.where(seen, P * tl.exp(tl.where(seen, G[:, None] - G[None, :], 0.0)), 0.0)
    tl.store(scores + (row * NV + n)[:, None] * ROWS + i[None, :], P, mask=used[:, None])


@triton.jit
def _scan_kernel(
    heads, address, chunks, starts, sums, scores, mixed, lost, recurrent,
    NK: tl.constexpr, NV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = 2 * NK * DK + NV * DV
    sequence = tl.program_id(0)
    n = tl.program_id(1)
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DKP)
    e = tl.program_id(2) * BV + tl.arange(0, BV)
    part = n * DK * DV + d[:, None] * DV + e[None, :]
    inside = (d < DK)[:, None] & (e < DV)[None, :]
    first = tl.load(starts + sequence)
    source = tl.load(chunks + first * 5 + 3)
    old = matrix(tl.load(address + tl.maximum(source, 0)) + recurrent, tl.float32, ALIGN)
    S = tl.load(old + part, mask=inside & (source >= 0), other=0.0)
    for c in range(first, tl.load(starts + sequence + 1)):
        begin = tl.load(chunks + c * 5)
        end = tl.load(chunks + c * 5 + 1)
        target = tl.load(chunks + c * 5 + 4)
        row = (begin + i).to(tl.int64)
        used = row < end
        keys = used[:, None] & (d < DK)[None, :]
        values = used[:, None] & (e < DV)[None, :]
        line = row * NV + n
        W = tl.load(lost + line[:, None] * DK + d[None, :], mask=keys, other=0.0)
        U = tl.load(mixed + line[:, None] * DV + e[None, :], mask=values, other=0.0)
        V = U - tl.dot(W, S, input_precision=PRECISION)
        G = tl.load(sums + line, mask=used, other=0.0)
        last = tl.load(sums + (end - 1).to(tl.int64) * NV + n)
        at = heads + row[:, None] * C + n // (NV // NK) * DK + d[None, :]
        q = tl.load(at, mask=keys, other=0.0) * tl.exp(G)[:, None]
        P = tl.load(scores + line[:, None] * ROWS + i[None, :], mask=used[:, None], other=0.0)
        O = tl.dot(q, S, input_precision=PRECISION)
        O = tl.dot(P, V, O, input_precision=PRECISION)
        tl.store(mixed + line[:, None] * DV + e[None, :], O, mask=values)  # in the place of U
        k = tl.load(at + NK * DK, mask=keys, other=0.0) * tl.exp(last - G)[:, None]
        S = tl.dot(tl.trans(k), V, S * tl.exp(last), input_precision=PRECISION)
        if target >= 0:
            new = matrix(tl.load(address + target) + recurrent, tl.float32, ALIGN)
            tl.store(new + part, S, mask=inside)


@triton.jit
def _norm_kernel(
    mixed, z, norm, y, heads, stride, eps,
    NV: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, DVP)
    at = line[:, None] * DV + e[None, :]
    inside = (line < heads)[:, None] & (e < DV)[None, :]
    o = tl.load(mixed + at, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(o * o, axis=1) / DV + eps)
    gates = z + (line // NV * stride + line % NV * DV)[:, None] + e[None, :]
    gate = silu(tl.load(gates, mask=inside, other=0.0).to(tl.float32))
    w = tl.load(norm + e, mask=e < DV, other=0.0)
    tl.store(y + at, (o * scale[:, None] * w[None, :] * gate).to(y.dtype.element_ty), mask=inside)


def delta_chunks(
    qkv: torch.Tensor,  # [T, C] act, rows of any stride
    z: torch.Tensor,  # [T, NV DV] act, rows of any stride
    b: torch.Tensor,  # [T, NV] float32, rows of one stride with a
    a: torch.Tensor,  # [T, NV] float32
    weights: DeltaWeights,
    states: LayerStates,
    spans: tuple[StateSpan, ...],  # the rows of the first to the last: none is missing
) -> torch.Tensor:  # [T, NV DV] act; rows behind the last span as the last one
    T, device = len(qkv), qkv.device
    NK, NV = weights.num_key_heads, weights.num_value_heads
    DK, DV = weights.key_dim, weights.value_dim
    width, channels = weights.conv.shape
    assert qkv.shape == (T, channels) and z.shape == (T, NV * DV), (qkv.shape, z.shape)
    assert all(x.stride(1) == 1 for x in (qkv, z, b, a)) and b.stride() == a.stride(), b.stride()
    y = torch.empty(z.shape, dtype=z.dtype, device=device)
    if not spans:
        return y.zero_()
    chunks, starts = _on_device(spans, device)
    rows = spans[-1].end

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    heads, sums = scratch(rows, channels), scratch(rows, NV)
    mixed, lost = scratch(rows, NV, DV), scratch(rows, NV, DK)
    scores = scratch(rows, NV, CHUNK_ROWS)
    dims = {"NK": NK, "NV": NV, "DK": DK, "DV": DV}
    key_block, value_block = max(16, power_of_2(DK)), max(16, power_of_2(DV))
    precision = "tf32x3" if qkv.dtype == torch.float32 else "tf32"
    _heads_kernel[(len(chunks), 2 * NK + NV)](
        qkv, weights.conv, states.address, chunks, heads, qkv.stride(0), states.tail, UNIT_EPS,
        **dims, W=width, ACT=tl_dtype(qkv.dtype), ALIGN=SLOT_ALIGN, ROWS=CHUNK_ROWS,
        BLOCK=max(key_block, value_block),
        num_warps=8,
    )  # fmt: skip
    _chunks_kernel[(len(chunks), NV)](
        heads, b, a, weights.rate, weights.bias, chunks, sums, scores, mixed, lost,
        a.stride(0), **dims, ROWS=CHUNK_ROWS, DKP=key_block, DVP=value_block, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    columns = min(COLUMNS, value_block)
    _scan_kernel[(len(spans), NV, triton.cdiv(DV, columns))](
        heads, states.address, chunks, starts, sums, scores, mixed, lost, states.recurrent,
        **dims, ALIGN=SLOT_ALIGN, ROWS=CHUNK_ROWS, DKP=key_block, BV=columns, PRECISION=precision,
        num_warps=4, num_stages=1,  # more stages need more shared memory than an sm_86 has
    )  # fmt: skip
    lines = rows * NV
    _norm_kernel[(triton.cdiv(lines, NORM_HEADS),)](
        mixed, z, weights.norm, y, lines, z.stride(0), weights.norm_eps,
        NV=NV, DV=DV, DVP=value_block, ROWS=NORM_HEADS,
        num_warps=4,
    )  # fmt: skip
    if rows < T:
        y[rows:] = y[rows - 1]
    return y
