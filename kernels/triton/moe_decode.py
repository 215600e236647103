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

Of one expert, that ``both`` names, only the last inner rows are computed: the CPU has the others.

A route whose expert an earlier route names ends at once: the first one serves all. Routes -1 are
skipped without a read. Reference: ``TorchOps.moe``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..activation import SILU, Activation
from ..formats import ExpertLayout
from .activate import activate
from .launch import chained, let_next_start, wait_for_earlier
from .moe_decode_scaled import down_scaled, gate_up_scaled
from .numbers import matrix, power_of_2
from .scaled import Stored, finish, stored, unit_tile
from .serving import begin_of, copy_rest, first_block, rest_of, served, targets

MAX_ROWS = 8
ONCE = tl.constexpr("evict_first")  # read by one program: what the next kernels need stays cached
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
def _products(w, part, mine):
    """w [ROWS, COLUMNS] times part [COLUMNS], in the lines [TP, ROWS] that are ``mine``."""
    product = tl.sum(w.to(tl.float32) * part.to(tl.float32)[None, :], axis=1)
    return tl.where(mine[:, None], product[None, :], 0.0)


@triton.jit
def _gate_up_kernel(
    x, ids, address, fill, both, h,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, U: tl.constexpr, A: tl.constexpr,
    ALIGN: tl.constexpr, FILL: tl.constexpr, BOTH: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    I: tl.constexpr = G.rows
    H: tl.constexpr = G.columns
    expert, names = served(ids, tl.program_id(0), T, K, TP, KP)
    if expert >= 0:
        record, to, store = targets(address, fill, expert, FILL)
        gate = matrix(record + G.numbers, G.dtype, ALIGN)
        up = matrix(record + U.numbers, U.dtype, ALIGN)
        gate_to = matrix(to + G.numbers, G.dtype, ALIGN)
        up_to = matrix(to + U.numbers, U.dtype, ALIGN)
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        column = tl.arange(0, COLUMNS)
        first = first_block(begin_of(both, expert, BOTH), ROWS)
        for block in range(first, tl.cdiv(I, ROWS), tl.num_programs(1)):
            i = block * ROWS + tl.arange(0, ROWS)
            acc_gate = tl.zeros([TP, ROWS], tl.float32)
            acc_up = tl.zeros([TP, ROWS], tl.float32)
            for start in tl.static_range(0, H, COLUMNS):
                c = start + column
                at = i[:, None] * H + c[None, :]
                inside = (i < I)[:, None] & (c < H)[None, :]
                g = tl.load(gate + at, mask=inside, other=0.0, eviction_policy=ONCE)
                u = tl.load(up + at, mask=inside, other=0.0, eviction_policy=ONCE)
                if FILL:
                    tl.store(gate_to + at, g, mask=inside & store)
                    tl.store(up_to + at, u, mask=inside & store)
                for t in range(T):
                    if T == 1 or (bits >> t) & 1:  # one row: no branch for loads to wait behind
                        part = tl.load(x + t * H + c, mask=c < H, other=0.0)
                        acc_gate += _products(g, part, token == t)
                        acc_up += _products(u, part, token == t)
            acc_gate = finish(acc_gate, record, to, store, i, G, FILL)
            acc_up = finish(acc_up, record, to, store, i, U, FILL)
            value = activate(acc_gate, acc_up, A)  # [TP, ROWS]
            out = h + route[:, :, None] * I + i[None, None, :]  # all routes that name the expert
            tl.store(
                out,
                tl.broadcast_to(value[:, None, :], [TP, KP, ROWS]).to(h.dtype.element_ty),
                mask=names[:, :, None] & (i < I)[None, None, :],
            )


@triton.jit
def _down_kernel(
    h, ids, address, fill, both, y,
    T: tl.constexpr, K: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
    ALIGN: tl.constexpr, FILL: tl.constexpr, BOTH: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    H: tl.constexpr = D.rows
    I: tl.constexpr = D.columns
    expert, names = served(ids, tl.program_id(0), T, K, TP, KP)
    if expert >= 0:
        record, to, store = targets(address, fill, expert, FILL)
        down = matrix(record + D.numbers, D.dtype, ALIGN)
        down_to = matrix(to + D.numbers, D.dtype, ALIGN)
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        # where the h of each row lies: any of its routes that name the expert holds the same
        source = tl.max(tl.where(names, route, -1), axis=1)  # [TP]
        begin = begin_of(both, expert, BOTH)
        column = tl.arange(0, COLUMNS)
        for block in range(tl.program_id(1), tl.cdiv(H, ROWS), tl.num_programs(1)):
            o = block * ROWS + tl.arange(0, ROWS)
            acc = tl.zeros([TP, ROWS], tl.float32)
            for start in tl.static_range(0, I, COLUMNS):
                c = start + column
                at = o[:, None] * I + c[None, :]
                mine = (c >= begin) & (c < I)
                inside = (o < H)[:, None] & mine[None, :]
                w = tl.load(down + at, mask=inside, other=0.0, eviction_policy=ONCE)
                if FILL:
                    tl.store(down_to + at, w, mask=inside & store)
                for t in range(T):
                    if T == 1 or (bits >> t) & 1:
                        from_route = tl.max(tl.where(token == t, source, -1), axis=0)
                        part = tl.load(h + from_route * I + c, mask=mine, other=0.0)
                        acc += _products(w, part, token == t)
            acc = finish(acc, record, to, store, o, D, FILL)
            out = y + route[:, :, None] * H + o[None, None, :]
            tl.store(
                out,
                tl.broadcast_to(acc[:, None, :], [TP, KP, ROWS]),
                mask=names[:, :, None] & (o < H)[None, None, :],
            )
        if FILL and tl.program_id(1) == 0:
            copy_rest(record, to, store, REST)


@triton.jit
def _combine_kernel(
    y, ids, weights, out,
    K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        used = tl.load(ids + t * K + k) >= 0
        value = tl.load(y + (t * K + k) * H + h, mask=h < H, other=0.0)
        value = tl.where(used, value, 0.0)  # as a mask of the load, it would be waited for
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
    activation: Activation = SILU,
) -> torch.Tensor:  # [T, H] float32
    y = route_products(x, ids, address, layout, fill, tuning, activation)
    return combine(y, ids, weights)


def route_products(
    x: torch.Tensor,  # [T, H] act, contiguous, T <= MAX_ROWS
    ids: torch.Tensor,  # [T, K] int32, contiguous, -1: route not in use
    address: torch.Tensor,  # [E] int64: records in GPU memory or pinned host memory, mixed at will
    layout: ExpertLayout,
    fill: torch.Tensor | None = None,  # [E] int64: where to store the record as it is read; 0: not
    tuning: Tuning = DEFAULT,
    activation: Activation = SILU,
    both: torch.Tensor | None = None,  # [2] int32: expert or -1, its inner rows that are not ours
) -> torch.Tensor:  # [T * K, H] float32: down(activation(gate x, up x)) of each route in use
    (T, H), K = x.shape, ids.shape[1]
    assert T <= MAX_ROWS and layout.hidden == H and len(ids) == T, (x.shape, ids.shape)
    assert all(a.is_contiguous() for a in (x, ids, address)), (x.stride(), ids.stride())
    assert ids.dtype == torch.int32 and address.dtype == torch.int64, (ids.dtype, address.dtype)
    assert fill is None or fill.shape == address.shape, fill
    h = torch.empty(T * K, layout.inner, dtype=x.dtype, device=x.device)
    y = torch.empty(T * K, H, dtype=torch.float32, device=x.device)
    if T == 0:
        return y
    gate, up, down = (stored(m) for m in layout.matrices.values())
    shared = dict(
        T=T, K=K, FILL=fill is not None, BOTH=both is not None,
        TP=power_of_2(T), KP=power_of_2(K), num_warps=tuning.warps, **chained(x),
    )  # fmt: skip
    table = fill if fill is not None else address
    divided = both if both is not None else address
    kernel, rows, tile = _kernel(_gate_up_kernel, gate_up_scaled, layout, gate, tuning)
    kernel[(T * K, _programs(tuning, gate.rows, rows))](
        x, ids, address, table, divided, h, G=gate, U=up, A=activation, **tile, **shared
    )
    kernel, rows, tile = _kernel(_down_kernel, down_scaled, layout, down, tuning)
    kernel[(T * K, _programs(tuning, down.rows, rows))](
        h, ids, address, table, divided, y, D=down, REST=rest_of(layout), **tile, **shared
    )
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
            y, ids, weights, out, K=K, H=H, BLOCK=block, num_warps=4, **chained(y)
        )
    return out


def alignment(layout: ExpertLayout) -> int:
    """What divides the addresses of an expert's matrices, at most ``MATRIX_ALIGN`` bytes."""
    return math.gcd(MATRIX_ALIGN, layout.gate_offset, layout.up_offset, layout.down_offset)


def _kernel(
    plain: Any, scaled: Any, layout: ExpertLayout, matrix: Stored, tuning: Tuning
) -> tuple[Any, int, dict[str, int]]:
    """Which kernel reads a matrix, the rows of a program at a time, and its tile."""
    if matrix.scaled:
        rows, units = unit_tile(tuning.rows, tuning.columns, matrix)
        return scaled, rows, {"ROWS": rows, "UNITS": units}
    rows, columns = _tile(tuning, matrix.columns, matrix.row_bytes // matrix.columns)
    return plain, rows, {"ROWS": rows, "COLUMNS": columns, "ALIGN": alignment(layout)}


def _tile(tuning: Tuning, columns: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a tile: about the bytes asked for, and no lane beyond the matrix."""
    wide = columns & -columns  # the largest power of two that divides it
    wide = min(tuning.columns, wide if wide >= 256 else power_of_2(columns))
    rows = tuning.rows * 2 // itemsize * tuning.columns // wide
    return max(1, min(rows, 16)), wide


def _programs(tuning: Tuning, rows: int, block: int) -> int:
    blocks = triton.cdiv(rows, block)
    return min(tuning.programs, blocks) if tuning.programs else blocks
