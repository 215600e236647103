"""Matrices in scaled formats as the kernels read them: what ``kernels.decode`` means, for tiles.

A tile is R rows of U units of 16 bytes, the widest load of a thread: four words. A unit holds 16
columns of e4m3 or 32 of four bits, so all columns of a group, and mostly their scale too, are one
thread's. Numbers become float32 by their bits (Triton converts e4m3 only from sm_89 on): put
where a float16 has sign, exponent and fraction they are right but for a power of two, ``LIFT``,
which their scales make good. Every step but products with a scale of more than eight bits is exact.

The code of NaN in e4m3, which no checkpoint stores, is read as 480.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..formats import FORMATS, MatrixLayout
from .numbers import matrix, power_of_2, tl_dtype, wide_dot

UNIT_BYTES = tl.constexpr(16)
FP8 = tl.constexpr(FORMATS["fp8"].code)
FP8_ROW = tl.constexpr(FORMATS["fp8-row"].code)
MXFP4 = tl.constexpr(FORMATS["mxfp4"].code)
NVFP4 = tl.constexpr(FORMATS["nvfp4"].code)
INT4 = tl.constexpr(FORMATS["int4"].code)

# e4m3 read as float16 is 2^8 too small, e2m1 2^14
LIFT_E4M3 = tl.constexpr(2.0**8)
LIFT_NVFP4 = tl.constexpr(2.0**22)  # e2m1 times e4m3
LIFT_BITS_E2M1 = tl.constexpr(14)
SIGNS = tl.constexpr(0x80008000 - (1 << 32))  # of the two float16 of a word


class Stored(NamedTuple):
    """One matrix of a record, as constants of a kernel; offsets are bytes from its start."""

    kind: int  # the format's code
    bits: int  # of a number
    dtype: tl.dtype  # of the numbers, where they are not scaled
    scaled: bool
    scale_dtype: tl.dtype  # uint8: a code of eight bits
    across: int  # scales of one row
    numbers: int
    scales: int
    factor: int
    bias: int  # -1: none
    rows: int
    columns: int
    row_bytes: int
    read: tl.dtype  # what its packed bytes are read as
    row_parts: int  # of these in a row, and in a unit
    unit_parts: int
    unit: int  # columns of a unit
    groups: int  # of columns with a scale of their own, in a unit: at least one
    units: int  # of a row; the last one may be partial


def stored(m: MatrixLayout) -> Stored:
    fmt = m.format
    unit = 8 * UNIT_BYTES.value // fmt.bits
    row_bytes = m.columns * fmt.bits // 8
    words = row_bytes % 4 == 0
    return Stored(
        kind=fmt.code,
        bits=fmt.bits,
        dtype=tl.uint8 if fmt.scaled else tl_dtype(fmt.dtype),
        scaled=fmt.scaled,
        scale_dtype=tl.bfloat16 if fmt.scale_dtype is torch.bfloat16 else tl.uint8,
        across=m.scale_shape[1] if fmt.scaled else 0,
        numbers=m.offset,
        scales=m.scale_offset,
        factor=m.factor_offset,
        bias=-1 if m.bias_offset is None else m.bias_offset,
        rows=m.rows,
        columns=m.columns,
        row_bytes=row_bytes,
        read=tl.int32 if words else tl.uint8,
        row_parts=row_bytes // (4 if words else 1),
        unit_parts=UNIT_BYTES.value // (4 if words else 1),
        unit=unit,
        groups=unit // fmt.scale_columns if fmt.bits == 4 else 1,
        units=-(-m.columns // unit),
    )


@triton.jit
def half(bits):
    """Float16 of the lower sixteen bits, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def halves(bits):
    """Two float16 of a word, as float32, the lower one first: a last axis of two."""
    return tl.join(half(bits), half(bits >> 16))


@triton.jit
def e4m3(code):
    """As float32, divided by LIFT_E4M3."""
    wide = code.to(tl.int32)
    return half(((wide & 0x7F) << 7) | ((wide & 0x80) << 8))


@triton.jit
def moved(word, LEFT: tl.constexpr):
    if LEFT >= 0:
        word = word << LEFT
    else:
        word = word >> -LEFT
    return word


@triton.jit
def e4m3_pairs(word, FROM: tl.constexpr):
    """Of the byte at bit FROM and of the one 16 bits higher, as ``e4m3``."""
    return halves((moved(word, 7 - FROM) & 0x3F803F80) | (moved(word, 8 - FROM) & SIGNS))


@triton.jit
def nibble_pairs(word, FROM: tl.constexpr, M: tl.constexpr):
    """Of the nibble at bit FROM and of the one 16 bits higher; e2m1 divided by 2^14."""
    if M.kind == INT4:  # 2^23 + code, as float32 has its fraction
        low = (moved(word, -FROM) & 15) | 0x4B000000
        high = (moved(word, -FROM - 16) & 15) | 0x4B000000
        number = tl.join(low, high).to(tl.float32, bitcast=True) - 8388616.0
    else:
        number = halves((moved(word, 9 - FROM) & 0x0E000E00) | (moved(word, 12 - FROM) & SIGNS))
    return number


@triton.jit
def numbers_of(tile, M: tl.constexpr):
    """A tile of ``load_units`` to [R, U, columns of a unit] float32, without scales.

    Words are taken apart two numbers at a time; ``join`` puts them in the order of columns.
    """
    shape: tl.constexpr = [tile.shape[0], tile.shape[1], M.unit]
    if M.bits == 4:
        even = tl.join(nibble_pairs(tile, 0, M), nibble_pairs(tile, 8, M))
        odd = tl.join(nibble_pairs(tile, 4, M), nibble_pairs(tile, 12, M))
        number = tl.reshape(tl.join(even, odd), shape)
    elif M.row_bytes % 4 == 0:
        number = tl.reshape(tl.join(e4m3_pairs(tile, 0), e4m3_pairs(tile, 8)), shape)
    else:
        number = e4m3(tile)
    return number


@triton.jit
def load_units(record, to, store, row, first, M: tl.constexpr, UNITS: tl.constexpr,
               FILL: tl.constexpr, begin=0):  # fmt: skip
    """Units first .. first + UNITS - 1 of the rows ``row`` [R], zeros beyond the matrix and for
    columns before ``begin``, which is a multiple of a unit's.

    [R, U, 4] int32, or [R, U, 16] uint8 where rows are no whole words.

    With FILL they are also stored in the record at ``to``, if ``store``.
    """
    source = matrix(record + M.numbers, M.read, UNIT_BYTES)
    unit = first + tl.arange(0, UNITS)
    part = unit[:, None] * M.unit_parts + tl.arange(0, M.unit_parts)[None, :]
    place = row[:, None, None] * M.row_parts + part[None, :, :]
    inside = (row < M.rows)[:, None, None] & (part < M.row_parts)[None, :, :]
    inside = inside & (unit * M.unit >= begin)[None, :, None]
    tile = tl.load(source + place, mask=inside, other=0)
    if FILL:
        target = matrix(to + M.numbers, M.read, UNIT_BYTES)
        tl.store(target + place, tile, mask=inside & store)
    return tile


@triton.jit
def load_scales(record, to, store, row, first, M: tl.constexpr, UNITS: tl.constexpr,
                FILL: tl.constexpr, begin=0):  # fmt: skip
    """Of the groups in ``load_units``, [R, U * groups] float32, LIFT made good.

    Scales of fp8-row are left to ``finish``. With FILL those that only these rows have are stored.
    """
    group = first * M.groups + tl.arange(0, UNITS * M.groups)
    if M.kind == FP8:
        column = group * M.unit
        inside = (row < M.rows)[:, None] & ((column >= begin) & (column < M.columns))[None, :]
        place = (row // 128)[:, None] * M.across + (column // 128)[None, :]
        tiles = matrix(record + M.scales, tl.float32, UNIT_BYTES)
        scale = tl.load(tiles + place, mask=inside, other=0.0) * LIFT_E4M3
    elif M.bits == 4:
        used = (group * (M.unit // M.groups) >= begin) & (group < M.across)
        inside = (row < M.rows)[:, None] & used[None, :]
        place = row[:, None] * M.across + group[None, :]
        source = matrix(record + M.scales, M.scale_dtype, UNIT_BYTES)
        code = tl.load(source + place, mask=inside, other=0)
        if FILL:
            target = matrix(to + M.scales, M.scale_dtype, UNIT_BYTES)
            tl.store(target + place, code, mask=inside & store)
        if M.kind == MXFP4:  # 2^(code - 127), lifted in its exponent
            scale = ((code.to(tl.int32) + LIFT_BITS_E2M1) << 23).to(tl.float32, bitcast=True)
        elif M.kind == NVFP4:
            scale = e4m3(code) * LIFT_NVFP4
        else:
            scale = code.to(tl.float32)
    else:
        scale = tl.zeros([row.shape[0], UNITS * M.groups], tl.float32)
    return scale


@triton.jit
def add_products(acc, tile, scale, x, source, bits, first, M: tl.constexpr, T: tl.constexpr,
                 UNITS: tl.constexpr, begin=0):  # fmt: skip
    """``acc`` [TP, R] plus the tile times the rows ``source`` [TP] of x whose ``bits`` are set.

    T: how many rows may be; with one there is no branch for loads to wait behind.
    """
    number = numbers_of(tile, M)  # [R, U, unit]
    groups: tl.constexpr = UNITS * M.groups
    token = tl.arange(0, acc.shape[0])
    column = (first + tl.arange(0, UNITS))[:, None] * M.unit + tl.arange(0, M.unit)[None, :]
    for t in range(T):
        if T == 1 or (bits >> t) & 1:
            from_row = tl.max(tl.where(token == t, source, 0), axis=0)
            inside = (column >= begin) & (column < M.columns)
            part = tl.load(x + from_row * M.columns + column, mask=inside, other=0.0)
            product = number * part.to(tl.float32)[None, :, :]
            if M.groups > 1:
                product = tl.reshape(product, [acc.shape[1], groups, M.unit // M.groups])
            sums = tl.sum(product, axis=2)
            if M.kind != FP8_ROW:
                sums *= scale
            acc += tl.where(token[:, None] == t, tl.sum(sums, axis=1)[None, :], 0.0)
    return acc


@triton.jit
def of_rows(record, to, store, row, OFFSET: tl.constexpr, M: tl.constexpr, FILL: tl.constexpr):
    """A float32 of each row; also stored, with FILL."""
    inside = row < M.rows
    value = tl.load(matrix(record + OFFSET, tl.float32, UNIT_BYTES) + row, mask=inside, other=0.0)
    if FILL:
        tl.store(matrix(to + OFFSET, tl.float32, UNIT_BYTES) + row, value, mask=inside & store)
    return value


@triton.jit
def finish(acc, record, to, store, row, M: tl.constexpr, FILL: tl.constexpr):
    """[.., R] sums times what the rows share of scales, plus bias; stores these with FILL."""
    if M.kind == FP8_ROW:
        scale = of_rows(record, to, store, row, M.scales, M, FILL) * LIFT_E4M3
        acc *= scale[None, :]
    if M.kind == NVFP4:
        acc *= tl.load(matrix(record + M.factor, tl.float32, UNIT_BYTES))
    if M.bias >= 0:
        acc += of_rows(record, to, store, row, M.bias, M, FILL)[None, :]
    return acc


@triton.jit
def load_tile(record, row, scale, first, M: tl.constexpr, UNITS: tl.constexpr, DOT: tl.constexpr):
    """A tile for ``tl.dot``, [U * unit, R] of type ``DOT``, which must hold its values exactly.

    Args:
        scale: of ``tile_scale``; of e4m3 it is still to be multiplied.
    """
    number = numbers_of(load_units(record, record, False, row, first, M, UNITS, False), M)
    if M.bits == 4:
        number = tl.reshape(number, [row.shape[0], UNITS * M.groups, M.unit // M.groups])
        number = number * scale[:, :, None]
    flat = tl.reshape(number, [row.shape[0], UNITS * M.unit])
    return tl.trans(flat.to(DOT))


@triton.jit
def tile_scale(record, row, first_row, first, M: tl.constexpr, UNITS: tl.constexpr):
    """Of ``load_tile``, to be read while an earlier tile is multiplied.

    Of four bits one for each group; of fp8 one, as a tile stays within 128 rows and columns.
    """
    scale = 0.0
    if M.bits == 4:
        scale = load_scales(record, record, False, row, first, M, UNITS, False)
    elif M.kind == FP8:
        place = first_row // 128 * M.across + first * M.unit // 128
        tiles = matrix(record + M.scales, tl.float32, UNIT_BYTES)
        scale = tl.load(tiles + place, mask=first < M.units, other=0.0) * LIFT_E4M3
    return scale


def unit_tile(rows: int, columns: int, matrix: Stored) -> tuple[int, int]:
    """Rows and units of a GEMV's tile of about rows x columns, with few lanes beyond the matrix."""
    most, all_units = columns // matrix.unit, power_of_2(matrix.units)
    least = min(8, all_units)  # 128 bytes of a row side by side, or the whole row
    widths = [1 << bit for bit in range(8) if least <= 1 << bit <= min(most, all_units)]
    padded = {width: -(-matrix.units // width) * width for width in widths}
    width = max(w for w in widths if padded[w] <= min(padded.values()) * 9 // 8)
    return max(1, min(rows * most // width, max(16, rows))), width


class DotType(NamedTuple):
    """How products with a matrix run on tensor cores: all of them exact, sums in float32."""

    dtype: tl.dtype
    precision: str


def dot_type(matrix: Stored, act: torch.dtype) -> DotType:
    """bfloat16 holds four-bit numbers times e8m0 or e4m3, and e4m3 without its scale.

    Four bits times bfloat16 are eleven bits, which tf32 holds.
    """
    if wide_dot(act):
        return DotType(tl.float32, "ieee")
    if matrix.kind == INT4.value:
        return DotType(tl.float32, "tf32")
    if (matrix.scaled and act == torch.bfloat16) or matrix.dtype == tl_dtype(act):
        return DotType(tl_dtype(act), "ieee")
    return DotType(tl.float32, "ieee")
