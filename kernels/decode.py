"""What the stored numbers of a format mean, in plain torch: w = number · scale, in float32."""

from __future__ import annotations

import torch

from .formats import FORMATS, MatrixLayout, PackedMatrix

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 codes 0..7; bit 3 is the sign
INT4_OFFSET = 8
_SIGNED_FP4 = (*FP4_VALUES, *(-v for v in FP4_VALUES))
_NIBBLES = {  # what each code of four bits means, without a scale
    FORMATS["mxfp4"]: _SIGNED_FP4,
    FORMATS["nvfp4"]: _SIGNED_FP4,
    FORMATS["int4"]: tuple(float(code - INT4_OFFSET) for code in range(16)),
}


def decode(packed: PackedMatrix) -> torch.Tensor:  # [rows, columns]
    """The whole matrix in float32."""
    return decode_rows(packed.layout, packed.data, 0, packed.layout.rows)


def decode_rows(
    matrix: MatrixLayout,
    record: torch.Tensor,  # [bytes] uint8
    first: int,
    end: int,
) -> torch.Tensor:  # [end - first, columns]
    """Rows of a matrix: views of an unscaled format's numbers, else float32."""
    fmt = matrix.format
    row_bytes = matrix.data_bytes // matrix.rows
    stored = record[matrix.offset + first * row_bytes : matrix.offset + end * row_bytes]
    numbers = stored.view(fmt.dtype).view(end - first, -1)
    if not fmt.scaled:
        return numbers
    if fmt.bits == 4:
        codes = torch.stack((numbers & 15, numbers >> 4), -1).flatten(1)
        values = torch.tensor(_NIBBLES[fmt], device=codes.device)[
            codes.long()
        ]  # [end - first, columns]
    else:
        values = numbers.float()
    values *= _scales(matrix, record, first, end)
    return values


def _scales(
    matrix: MatrixLayout, record: torch.Tensor, first: int, end: int
) -> torch.Tensor:  # [end - first, columns or 1]
    fmt = matrix.format
    assert fmt.scale_dtype is not None
    stored = record[matrix.scale_offset : matrix.scale_offset + matrix.scale_bytes]
    scale = stored.view(fmt.scale_dtype).view(matrix.scale_shape)
    scale = scale[
        torch.arange(first, end, device=scale.device) // fmt.scale_rows
    ]  # one row for each
    if fmt.scale_dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)  # 2^(code - 127)
    wide = scale.float()
    if fmt.factor:
        wide = wide * record[matrix.factor_offset : matrix.factor_offset + 4].view(torch.float32)
    if fmt.scale_columns:
        wide = wide.repeat_interleave(fmt.scale_columns, 1)[:, : matrix.columns]
    return wide


def bias(matrix: MatrixLayout, record: torch.Tensor) -> torch.Tensor | None:  # [rows] float32
    if matrix.bias_offset is None:
        return None
    return record[matrix.bias_offset : matrix.bias_offset + 4 * matrix.rows].view(torch.float32)
