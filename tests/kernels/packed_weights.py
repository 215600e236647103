"""Random matrices in every scaled format, from encoders that share nothing with the decoders."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ftd.kernels.formats import FORMATS, ExpertLayout, MatrixLayout, PackedMatrix, expert_layout

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]

Stored = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Numbers, scales and factor as they are stored, and the weights they stand for."""


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def _spread(scale: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    return scale[:, torch.arange(columns) // group]


def _e4m3(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8(rows: int, columns: int) -> Stored:
    numbers = _e4m3(rows, columns)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) / 1000
    tile = scale[torch.arange(rows) // 128][:, torch.arange(columns) // 128]
    return numbers, scale, None, numbers.float() * tile


def fp8_row(rows: int, columns: int) -> Stored:
    numbers, scale = _e4m3(rows, columns), torch.rand(rows, 1) / 1000
    return numbers, scale, None, numbers.float() * scale


def mxfp4(rows: int, columns: int) -> Stored:
    codes = torch.randint(0, 16, (rows, columns))
    power = torch.randint(-9, -3, (rows, columns // 32))
    weights = torch.tensor(E2M1)[codes] * _spread(2.0**power, 32, columns)
    return _nibbles(codes), (power + 127).to(torch.uint8), None, weights


def nvfp4(rows: int, columns: int) -> Stored:
    codes = torch.randint(0, 16, (rows, columns))
    scale = (torch.rand(rows, columns // 16) * 448).to(torch.float8_e4m3fn)
    factor = torch.tensor([3.1e-4])
    weights = torch.tensor(E2M1)[codes] * _spread(scale.float() * factor, 16, columns)
    return _nibbles(codes), scale, factor, weights


def int4(rows: int, columns: int) -> Stored:
    codes = torch.randint(0, 16, (rows, columns))
    scale = (torch.rand(rows, columns // 32) / 50).bfloat16()
    return _nibbles(codes), scale, None, (codes - 8.0) * _spread(scale.float(), 32, columns)


ENCODERS: dict[str, Callable[[int, int], Stored]] = {
    "fp8": fp8,
    "fp8-row": fp8_row,
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "int4": int4,
}


def put(record: torch.Tensor, offset: int, numbers: torch.Tensor) -> None:
    stored = numbers.contiguous().flatten().view(torch.uint8)
    record[offset : offset + len(stored)] = stored


def fill(record: torch.Tensor, matrix: MatrixLayout) -> torch.Tensor:  # [rows, columns] float32
    """Random numbers for one matrix of a record; the weights they stand for."""
    rows, columns = matrix.rows, matrix.columns
    if not matrix.format.scaled:
        weights = (torch.randn(rows, columns) / columns**0.5).to(matrix.format.dtype)
        put(record, matrix.offset, weights)
        return weights.float()
    numbers, scale, factor, weights = ENCODERS[matrix.format.name](rows, columns)
    put(record, matrix.offset, numbers)
    put(record, matrix.scale_offset, scale)
    if factor is not None:
        put(record, matrix.factor_offset, factor)
    return weights


def random_matrix(name: str, rows: int, columns: int) -> tuple[PackedMatrix, torch.Tensor]:
    packed = PackedMatrix.empty(FORMATS[name], rows, columns)
    return packed, fill(packed.data, packed.layout)


def random_expert(
    name: str, hidden: int, inner: int, down: str | None = None, bias: bool = False
) -> tuple[ExpertLayout, torch.Tensor, list[torch.Tensor]]:
    """Layout, record, and gate, up and down; with ``bias`` their three biases after them."""
    layout = expert_layout(
        FORMATS[name], hidden, inner, down=FORMATS[down] if down else None, bias=bias
    )
    record = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    matrices = [fill(record, m) for m in layout.matrices.values()]
    if bias:
        for m in layout.matrices.values():
            assert m.bias_offset is not None
            matrices.append(torch.randn(m.rows) * 0.1)
            put(record, m.bias_offset, matrices[-1])
    return layout, record, matrices


def random_records(
    name: str, hidden: int, inner: int, count: int, *, down: str | None = None, bias: bool = False
) -> tuple[ExpertLayout, torch.Tensor, torch.Tensor]:
    """Layout, records of so many experts, and their addresses."""
    experts = [random_expert(name, hidden, inner, down, bias)[:2] for _ in range(count)]
    layout, records = experts[0][0], torch.stack([record for _, record in experts])
    return layout, records, records.data_ptr() + torch.arange(count) * layout.record_bytes
