"""The two products of ``moe_decode`` for matrices in scaled formats; the same programs and order.

Of an expert that the CPU computes, too, only rows of gate and up from ``begin_of`` on are read, and
of each row of down the columns from there on.

Reads packed bytes: numbers, scales, factors and biases of a row are read by the program that owns
the row, and stored by it where the fill table says; what no row owns (scales of tiles, factors,
gaps, padding) is copied by ``_down``'s first program, see ``serving.rest_of``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activate import activate
from .launch import let_next_start, wait_for_earlier
from .scaled import add_products, finish, load_scales, load_units
from .serving import begin_of, copy_rest, first_block, served, targets


@triton.jit
def gate_up_scaled(
    x, ids, address, fill, both, h,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, U: tl.constexpr, A: tl.constexpr,
    FILL: tl.constexpr, BOTH: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    num_units: tl.constexpr = G.units
    expert, names = served(ids, tl.program_id(0), T, K, TP, KP)
    if expert >= 0:
        record, to, store = targets(address, fill, expert, FILL)
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        start = first_block(begin_of(both, expert, BOTH), ROWS)
        for block in range(start, tl.cdiv(G.rows, ROWS), tl.num_programs(1)):
            i = block * ROWS + tl.arange(0, ROWS)
            gate = tl.zeros([TP, ROWS], tl.float32)
            up = tl.zeros([TP, ROWS], tl.float32)
            for first in tl.static_range(0, num_units, UNITS):
                gate_tile = load_units(record, to, store, i, first, G, UNITS, FILL)
                up_tile = load_units(record, to, store, i, first, U, UNITS, FILL)
                gate_scale = load_scales(record, to, store, i, first, G, UNITS, FILL)
                up_scale = load_scales(record, to, store, i, first, U, UNITS, FILL)
                gate = add_products(gate, gate_tile, gate_scale, x, token, bits, first, G, T, UNITS)
                up = add_products(up, up_tile, up_scale, x, token, bits, first, U, T, UNITS)
            gate = finish(gate, record, to, store, i, G, FILL)
            up = finish(up, record, to, store, i, U, FILL)
            value = activate(gate, up, A)  # [TP, ROWS]
            out = h + route[:, :, None] * G.rows + i[None, None, :]
            tl.store(
                out,
                tl.broadcast_to(value[:, None, :], [TP, KP, ROWS]).to(h.dtype.element_ty),
                mask=names[:, :, None] & (i < G.rows)[None, None, :],
            )


@triton.jit
def down_scaled(
    h, ids, address, fill, both, y,
    T: tl.constexpr, K: tl.constexpr, D: tl.constexpr, REST: tl.constexpr,
    FILL: tl.constexpr, BOTH: tl.constexpr, TP: tl.constexpr, KP: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    let_next_start(CHAINED)
    wait_for_earlier(CHAINED)
    num_units: tl.constexpr = D.units
    expert, names = served(ids, tl.program_id(0), T, K, TP, KP)
    if expert >= 0:
        record, to, store = targets(address, fill, expert, FILL)
        token = tl.arange(0, TP)
        route = tl.arange(0, TP)[:, None] * K + tl.arange(0, KP)[None, :]
        bits = tl.sum(tl.max(names.to(tl.int32), axis=1) << token, axis=0)
        # where the h of each row lies: any of its routes that name the expert holds the same
        source = tl.max(tl.where(names, route, -1), axis=1)  # [TP]
        begin = begin_of(both, expert, BOTH)
        for block in range(tl.program_id(1), tl.cdiv(D.rows, ROWS), tl.num_programs(1)):
            o = block * ROWS + tl.arange(0, ROWS)
            acc = tl.zeros([TP, ROWS], tl.float32)
            for first in tl.static_range(0, num_units, UNITS):
                tile = load_units(record, to, store, o, first, D, UNITS, FILL, begin)
                scale = load_scales(record, to, store, o, first, D, UNITS, FILL, begin)
                acc = add_products(acc, tile, scale, h, source, bits, first, D, T, UNITS, begin)
            acc = finish(acc, record, to, store, o, D, FILL)
            out = y + route[:, :, None] * D.rows + o[None, None, :]
            tl.store(
                out,
                tl.broadcast_to(acc[:, None, :], [TP, KP, ROWS]),
                mask=names[:, :, None] & (o < D.rows)[None, None, :],
            )
        if FILL and tl.program_id(1) == 0:
            copy_rest(record, to, store, REST)
