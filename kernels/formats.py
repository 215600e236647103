"""How weights lie in memory, described once: loader, slots, CPU and GPU kernels read it.

A matrix [rows, columns] is row-major, its numbers as published; a scaled format keeps its scales
beside them, row-major too. An expert is one contiguous record, 4 KiB aligned: gate [I, H],
up [I, H], down [H, I], then their scales, factors and biases, each at a multiple of 64 bytes. An
expert of three plain matrices has no gaps.

What a stored number means is in ``kernels.decode``. Numbers that a matrix has few of (scales of
whole tiles or rows, factors, biases) are kept as float32, whatever they were published in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Union

import torch

RECORD_ALIGN_BYTES = 4096  # a page: direct reads, page-wise registration, no two experts share one
SECTION_ALIGN_BYTES = 64  # a cache line
# Inner rows of a piece, where two compute one expert: whole lines of plain numbers, and whole
# groups of any format's scales.
PLAIN_PART_ROWS = 64
SCALED_PART_ROWS = 128
# Of a number; by names, since plans are made of headers alone, and importing torch takes a second.
_ITEM_BYTES = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


def dtype_of(name: str) -> torch.dtype:
    """A type by torch's name for it."""
    found: torch.dtype = getattr(torch, name)
    return found


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store a matrix. Without a scale type the numbers are the weights."""

    name: str
    code: int  # what the C++ kernels call it: keep in step with kernels/cpu/ftd_cpu.h
    numbers: str  # torch's name of their type; uint8: two of four bits, the even column's low
    bits: int  # of a weight, without scales
    scales: str | None = None  # their type in memory
    scale_rows: int = 1  # rows that share a scale: tile i has rows i·n .. i·n + n - 1
    scale_columns: int = 0  # columns that share a scale; 0: the whole row
    factor: bool = False  # the matrix has one float32 that multiplies all its scales

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.numbers)

    @property
    def scale_dtype(self) -> torch.dtype | None:
        return dtype_of(self.scales) if self.scales else None

    @property
    def scaled(self) -> bool:
        return self.scales is not None

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the scales of a matrix; tiles at the border may be partial."""
        across = -(-columns // self.scale_columns) if self.scale_columns else 1
        return -(-rows // self.scale_rows), across

    @property
    def column_multiple(self) -> int:
        """What the number of columns must be a multiple of: whole groups, whole bytes."""
        return self.scale_columns if self.bits < 8 else 1


FORMATS: dict[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat("bf16", 0, "bfloat16", 16),
        WeightFormat("f16", 1, "float16", 16),
        WeightFormat("f32", 2, "float32", 32),
        # e4m3 times a scale of its tile, or of its row
        WeightFormat("fp8", 3, "float8_e4m3fn", 8, "float32", 128, 128),
        WeightFormat("fp8-row", 4, "float8_e4m3fn", 8, "float32"),
        # e2m1 times a power of two (e8m0)
        WeightFormat("mxfp4", 5, "uint8", 4, "uint8", 1, 32),
        # e2m1 times an e4m3 times the matrix' factor
        WeightFormat("nvfp4", 6, "uint8", 4, "float8_e4m3fn", 1, 16, factor=True),
        # 0..15, of which 8 is taken, times a bfloat16
        WeightFormat("int4", 7, "uint8", 4, "bfloat16", 1, 32),
    )
}


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Where the parts of one matrix are, in bytes from the start of its record."""

    format: WeightFormat
    rows: int
    columns: int
    offset: int = 0  # of the numbers
    scale_offset: int = 0
    factor_offset: int = 0
    bias_offset: int | None = None  # [rows] float32, added to the product; None: it has none

    @property
    def data_bytes(self) -> int:
        return self.rows * self.columns * self.format.bits // 8

    @property
    def scale_shape(self) -> tuple[int, int]:
        return self.format.scale_shape(self.rows, self.columns)

    @property
    def scale_bytes(self) -> int:
        scales = self.format.scales
        return prod(self.scale_shape) * _ITEM_BYTES[scales] if scales else 0

    @property
    def payload_bytes(self) -> int:
        """What a kernel reads of it."""
        bias = 0 if self.bias_offset is None else 4 * self.rows
        return self.data_bytes + self.scale_bytes + 4 * self.format.factor + bias


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the parts of one expert's record are. gate and up are of one format."""

    gate: MatrixLayout
    up: MatrixLayout
    down: MatrixLayout
    record_bytes: int  # multiple of RECORD_ALIGN_BYTES

    @property
    def matrices(self) -> dict[str, MatrixLayout]:
        return {"gate": self.gate, "up": self.up, "down": self.down}

    @property
    def hidden(self) -> int:  # H
        return self.down.rows

    @property
    def inner(self) -> int:  # I
        return self.down.columns

    @property
    def format(self) -> WeightFormat:
        """Of gate and up; down's may be another."""
        return self.gate.format

    @property
    def format_name(self) -> str:
        """For people: one name, or two where down's differs."""
        down = self.down.format.name
        return self.format.name if down == self.format.name else f"{self.format.name} and {down}"

    @property
    def part_rows(self) -> int:
        """Inner rows of one of ``parts``."""
        return PLAIN_PART_ROWS if self.plain else SCALED_PART_ROWS

    @property
    def parts(self) -> int:
        """Into how many pieces two may divide an expert; the last one has what is over."""
        return max(1, self.inner // self.part_rows)

    @property
    def plain(self) -> bool:
        """Three matrices of one unscaled format and nothing else."""
        matrices = self.matrices.values()
        return len({m.format for m in matrices}) == 1 and all(
            not m.format.scaled and m.bias_offset is None for m in matrices
        )

    @property
    def gate_offset(self) -> int:
        return self.gate.offset

    @property
    def up_offset(self) -> int:
        return self.up.offset

    @property
    def down_offset(self) -> int:
        return self.down.offset

    @property
    def payload_bytes(self) -> int:
        """Bytes a kernel reads for one token: the record without its padding."""
        return sum(m.payload_bytes for m in self.matrices.values())


def expert_layout(
    fmt: WeightFormat,
    hidden: int,
    inner: int,
    *,
    down: WeightFormat | None = None,
    bias: bool = False,
) -> ExpertLayout:
    """The record of an expert; ``down``: the down matrix' format, where it is another one."""
    shapes = [(fmt, inner, hidden), (fmt, inner, hidden), (down or fmt, hidden, inner)]
    (gate, up, last), end = _place(shapes, bias)
    return ExpertLayout(gate, up, last, -(-end // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES)


def matrix_layout(fmt: WeightFormat, rows: int, columns: int) -> tuple[MatrixLayout, int]:
    """One matrix by itself, and the bytes it takes."""
    (matrix,), end = _place([(fmt, rows, columns)], False)
    return matrix, end


def _place(
    shapes: list[tuple[WeightFormat, int, int]], bias: bool
) -> tuple[list[MatrixLayout], int]:
    bare = [MatrixLayout(fmt, rows, columns) for fmt, rows, columns in shapes]
    sizes = [m.data_bytes for m in bare] + [m.scale_bytes for m in bare]
    sizes += [4 * m.format.factor for m in bare] + [4 * m.rows * bias for m in bare]
    align = SECTION_ALIGN_BYTES if bias or any(m.format.scaled for m in bare) else 1
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // align) * align
    count = len(bare)

    def placed(i: int) -> MatrixLayout:
        m, at = bare[i], starts[i::count]
        return MatrixLayout(
            m.format, m.rows, m.columns, at[0], at[1], at[2], at[3] if bias else None
        )

    return [placed(i) for i in range(count)], end


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A dense layer's matrix in a scaled format: stands where a tensor of weights would."""

    layout: MatrixLayout
    data: torch.Tensor  # [bytes] uint8, a record of this one matrix

    @staticmethod
    def empty(fmt: WeightFormat, rows: int, columns: int) -> PackedMatrix:
        layout, num_bytes = matrix_layout(fmt, rows, columns)
        return PackedMatrix(layout, torch.empty(num_bytes, dtype=torch.uint8))

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.rows, self.layout.columns

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device) -> PackedMatrix:
        return PackedMatrix(self.layout, self.data.to(device))


Matrix = Union["torch.Tensor", PackedMatrix]  # torch need not be there yet


def stacked(parts: Sequence[PackedMatrix]) -> PackedMatrix | None:
    """Their rows one after another as one matrix; None where their scales keep them apart."""
    fmt, columns = parts[0].layout.format, parts[0].layout.columns
    alike = all(p.layout.format is fmt and p.layout.columns == columns for p in parts)
    whole_tiles = all(p.layout.rows % fmt.scale_rows == 0 for p in parts[:-1])
    if fmt.factor or not alike or not whole_tiles:
        return None
    rows = sum(p.layout.rows for p in parts)
    layout, num_bytes = matrix_layout(fmt, rows, columns)
    data = torch.empty(num_bytes, dtype=torch.uint8, device=parts[0].device)
    numbers, scales = layout.offset, layout.scale_offset
    for part in parts:
        at = part.layout
        for to, start, size in (
            (numbers, at.offset, at.data_bytes),
            (scales, at.scale_offset, at.scale_bytes),
        ):
            data[to : to + size] = part.data[start : start + size]
        numbers, scales = numbers + at.data_bytes, scales + at.scale_bytes
    return PackedMatrix(layout, data)


def scaled_formats() -> Iterator[WeightFormat]:
    return (row for row in FORMATS.values() if row.scaled)
