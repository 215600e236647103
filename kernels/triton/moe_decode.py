"""The experts of few rows: y[t] = Σ_k weight[t, k] · down(silu(gate x[t]) · up x[t]).

Memory-bound: reads each distinct expert once, 3*H*I numbers, whoever it serves. Weights are found
through the address table, and an address is one of a slot in GPU memory or of the record in pinned
host memory: a miss is read over the link by the same instructions, so its result is bitwise the
same. With a fill table the record is also stored, while it is read, where the table says.

Three kernels, so that every output is written by one program and added in one order, whatever
shares the batch:

1. gate-up: h = silu(gate x) · up x, rounded to act; a program for (route, rows of gate and up);
2. down: y of each route; a program for (route, rows of down);
3. combine: the weighted sum, in the order of k.

A route whose expert an earlier route names ends at once: the first one serves all. Routes -1 are
skipped without a read. Reference: ``TorchOps.moe``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..formats import ExpertLayout
from .numbers import TL_DTYPE, power_of_2

MAX_ROWS = 8
MATRIX_ALIGN = 16  # bytes, of a matrix in its record: the widest load


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the reads are spread; the result does not depend on it.

    Args:
        rows: of gate and of up, or of down, that a program holds at a time.
        columns: of them; of shorter rows it holds more.
        programs: for each route and kernel; 0: one for each block of rows. Few programs that each
            walk over many blocks keep fewer reads in flight, which a link may prefer.
    """

    rows: int = 4
    columns: int = 2048
    programs: int = 0
    warps: int = 4


DEFAULT = Tuning()


@triton.jit
def _served(ids, r, T: tl.constexpr, K: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr):
    """The expert of route ``r``, -1 if an earlier route does its work; which routes name it."""
    t = tl.arange(0, TP)[:, None]
    k = tl.arange(0, KP)[None, :]
    expert = tl.load(ids + r)
    names = tl.load(ids + t * K + k, mask=(t < T) & (k < K), other=-1) == expert  # [TP, KP]
    if T > 1:
        earlier = tl.max(tl.max((names & (t * K + k < r)).to(tl.int32), axis=1), axis=0)
        expert = tl.where(earlier > 0, -1, expert)
    else:
        names = (t * K + k) == r
    return expert, names


@triton.jit
def matrix(address, W: tl.constexpr, ALIGN: tl.constexpr):
    """A pointer to numbers ``W`` at ``address``; without the promise, loads would be narrow."""
    return tl.multiple_of(address.to(tl.pointer_type(W)), ALIGN)


@triton.jit
def _products(w, part, mine):
    """w [ROWS, COLUMNS] times part [COLUMNS], in the lines [TP, ROWS] that are ``mine``."""
    product = tl.sum(w.to(tl.float32) * part.to(tl.float32)[None, :], axis=1)
    return tl.where(mine[:, None], product[None, :], 0.0)


@triton.jit
def _gate_up_kernel(
    x, ids, address, fill, h,
    T: tl.constexpr, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    GATE: tl.constexpr, UP: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    FILL: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    expert, names = _served(ids, r, T, K, TP, KP)
    if expert >= 0:
        record = tl.load(address + expert)
        gate = matrix(record + GATE, W, ALIGN)
        up = matrix(record + UP, W, ALIGN)
        to = record
        if FILL:
            to = tl.load(fill + expert)
        gate_to = matrix(to + GATE, W, ALIGN)
        up_to = matrix(to + UP, W, ALIGN)
        store = to != 0
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        column = tl.arange(0, COLUMNS)
        for block in range(tl.program_id(1), tl.cdiv(I, ROWS), tl.num_programs(1)):
            i = block * ROWS + tl.arange(0, ROWS)
            acc_gate = tl.zeros([TP, ROWS], tl.float32)
            acc_up = tl.zeros([TP, ROWS], tl.float32)
            for start in tl.static_range(0, H, COLUMNS):
                c = start + column
                at = i[:, None] * H + c[None, :]
                inside = (i < I)[:, None] & (c < H)[None, :]
                g = tl.load(gate + at, mask=inside, other=0.0)
                u = tl.load(up + at, mask=inside, other=0.0)
                if FILL:
                    tl.store(gate_to + at, g, mask=inside & store)
                    tl.store(up_to + at, u, mask=inside & store)
                for t in range(T):
                    if T == 1 or (bits >> t) & 1:  # one row: no branch for loads to wait behind
                        part = tl.load(x + t * H + c, mask=c < H, other=0.0)
                        acc_gate += _products(g, part, token == t)
                        acc_up += _products(u, part, token == t)
            value = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up  # [TP, ROWS]
            out = h + route[:, :, None] * I + i[None, None, :]  # all routes that name the expert
            tl.store(
                out,
                tl.broadcast_to(value[:, None, :], [TP, KP, ROWS]).to(h.dtype.element_ty),
                mask=names[:, :, None] & (i < I)[None, None, :],
            )


@triton.jit
def _down_kernel(
    h, ids, address, fill, y,
    T: tl.constexpr, K: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
    DOWN: tl.constexpr, TAIL: tl.constexpr, TAIL_BYTES: tl.constexpr,
    W: tl.constexpr, ALIGN: tl.constexpr, FILL: tl.constexpr,
    TP: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0)
    expert, names = _served(ids, r, T, K, TP, KP)
    if expert >= 0:
        record = tl.load(address + expert)
        down = matrix(record + DOWN, W, ALIGN)
        to = record
        if FILL:
            to = tl.load(fill + expert)
        down_to = matrix(to + DOWN, W, ALIGN)
        store = to != 0
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        # where the h of each row lies: any of its routes that name the expert holds the same
        source = tl.max(tl.where(names, route, -1), axis=1)  # [TP]
        column = tl.arange(0, COLUMNS)
        for block in range(tl.program_id(1), tl.cdiv(H, ROWS), tl.num_programs(1)):
            o = block * ROWS + tl.arange(0, ROWS)
            acc = tl.zeros([TP, ROWS], tl.float32)
            for start in tl.static_range(0, I, COLUMNS):
                c = start + column
                at = o[:, None] * I + c[None, :]
                inside = (o < H)[:, None] & (c < I)[None, :]
                w = tl.load(down + at, mask=inside, other=0.0)
                if FILL:
                    tl.store(down_to + at, w, mask=inside & store)
                for t in range(T):
                    if T == 1 or (bits >> t) & 1:
                        from_route = tl.max(tl.where(token == t, source, -1), axis=0)
                        part = tl.load(h + from_route * I + c, mask=c < I, other=0.0)
                        acc += _products(w, part, token == t)
            out = y + route[:, :, None] * H + o[None, None, :]
            tl.store(
                out,
                tl.broadcast_to(acc[:, None, :], [TP, KP, ROWS]),
                mask=names[:, :, None] & (o < H)[None, None, :],
            )
        if FILL and TAIL_BYTES > 0 and tl.program_id(1) == 0:  # the record's padding
            b = tl.arange(0, 4096)
            bytes_from = (record + TAIL).to(tl.pointer_type(tl.uint8))
            bytes_to = (to + TAIL).to(tl.pointer_type(tl.uint8))
            padding = tl.load(bytes_from + b, mask=(b < TAIL_BYTES) & store, other=0)
            tl.store(bytes_to + b, padding, mask=(b < TAIL_BYTES) & store)


@triton.jit
def _combine_kernel(y, ids, weights, out, K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        used = tl.load(ids + t * K + k) >= 0
        value = tl.load(y + (t * K + k) * H + h, mask=(h < H) & used, other=0.0)
        acc += tl.load(weights + t * K + k) * value
    tl.store(out + t * H + h, acc, mask=h < H)


def moe_decode(
    x: torch.Tensor,  # [T, H] act, contiguous, T <= MAX_ROWS
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    weights: torch.Tensor,  # [T, K] float32, contiguous
    address: torch.Tensor,  # [E] int64
    layout: ExpertLayout,
    fill: torch.Tensor | None = None,
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:  # [T, H] float32
    return combine(route_products(x, ids, address, layout, fill, tuning), ids, weights)


def route_products(
    x: torch.Tensor,  # [T, H] act, contiguous, T <= MAX_ROWS
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    address: torch.Tensor,  # [E] int64: records in GPU memory or pinned host memory, mixed at will
    layout: ExpertLayout,
    fill: torch.Tensor | None = None,  # [E] int64: where to store the record as it is read; 0: not
    tuning: Tuning = DEFAULT,
) -> torch.Tensor:  # [T * K, H] float32: down(silu(gate x) · up x) of each route in use
    (T, H), K = x.shape, ids.shape[1]
    inner = layout.inner
    assert T <= MAX_ROWS and layout.hidden == H and len(ids) == T, (x.shape, ids.shape)
    assert all(a.is_contiguous() for a in (x, ids, address)), (x.stride(), ids.stride())
    assert ids.dtype == torch.int32 and address.dtype == torch.int64, (ids.dtype, address.dtype)
    assert fill is None or fill.shape == address.shape, fill
    h = torch.empty(T * K, inner, dtype=x.dtype, device=x.device)
    y = torch.empty(T * K, H, dtype=torch.float32, device=x.device)
    if T == 0:
        return y
    itemsize = layout.format.dtype.itemsize
    shared = dict(  # noqa: C408 - arguments, as a call spells them
        T=T, K=K, H=H, I=inner,
        W=TL_DTYPE[layout.format.dtype], ALIGN=alignment(layout), FILL=fill is not None,
        TP=power_of_2(T), KP=power_of_2(K), num_warps=tuning.warps,
    )  # fmt: skip
    table = fill if fill is not None else address
    rows, columns = _tile(tuning, H, itemsize)
    _gate_up_kernel[(T * K, _programs(tuning, inner, rows))](
        x, ids, address, table, h,
        GATE=layout.gate_offset, UP=layout.up_offset, ROWS=rows, COLUMNS=columns, **shared,
    )  # fmt: skip
    rows, columns = _tile(tuning, inner, itemsize)
    tail = layout.payload_bytes
    _down_kernel[(T * K, _programs(tuning, H, rows))](
        h, ids, address, table, y,
        DOWN=layout.down_offset, TAIL=tail, TAIL_BYTES=layout.record_bytes - tail,
        ROWS=rows, COLUMNS=columns, **shared,
    )  # fmt: skip
    return y


def combine(
    y: torch.Tensor,  # [T * K, H] float32: the output of each route; of unused ones anything
    ids: torch.Tensor,  # [T, K] int32, contiguous
    weights: torch.Tensor,  # [T, K] float32, contiguous
) -> torch.Tensor:  # [T, H] float32
    (T, K), H = ids.shape, y.shape[1]
    out = torch.empty(T, H, dtype=torch.float32, device=y.device)
    if T:
        block = min(512, power_of_2(H))
        _combine_kernel[(T, triton.cdiv(H, block))](
            y, ids, weights, out, K=K, H=H, BLOCK=block, num_warps=4
        )
    return out


def alignment(layout: ExpertLayout) -> int:
    """What divides the addresses of an expert's matrices, at most ``MATRIX_ALIGN`` bytes."""
    return math.gcd(MATRIX_ALIGN, layout.gate_offset, layout.up_offset, layout.down_offset)


def _tile(tuning: Tuning, columns: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: about the bytes asked for, and no lane beyond the matrix."""
    wide = columns & -columns  # the largest power of two that divides it
    wide = min(tuning.columns, wide if wide >= 256 else power_of_2(columns))
    rows = tuning.rows * 2 // itemsize * tuning.columns // wide
    return max(1, min(rows, 16)), wide


def _programs(tuning: Tuning, rows: int, block: int) -> int:
    blocks = triton.cdiv(rows, block)
    return min(tuning.programs, blocks) if tuning.programs else blocks
