"""How weights lie in memory, described once: loader, slots, CPU and GPU kernels read it.

An expert is one contiguous record, 4 KiB aligned: gate [I, H], up [I, H], down [H, I], row-major,
bytes as published. A format is a row of ``FORMATS``; formats with scales add their offsets here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RECORD_ALIGN_BYTES = 4096  # a page: direct reads, page-wise registration, no two experts share one


@dataclass(frozen=True, slots=True)
class WeightFormat:
    name: str
    code: int  # what the C++ kernels call it: keep in step with kernels/cpu/ftd_cpu.h
    dtype: torch.dtype  # of the stored numbers
    bytes_per_weight: float


FORMATS: dict[str, WeightFormat] = {
    row.name: row
    for row in (
        WeightFormat("bf16", 0, torch.bfloat16, 2.0),
        WeightFormat("f16", 1, torch.float16, 2.0),
        WeightFormat("f32", 2, torch.float32, 4.0),
    )
}


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the parts of one expert's record are, in bytes from its start."""

    format: WeightFormat
    hidden: int  # H
    inner: int  # I
    gate_offset: int
    up_offset: int
    down_offset: int
    record_bytes: int  # multiple of RECORD_ALIGN_BYTES

    @property
    def payload_bytes(self) -> int:
        """Bytes a kernel reads for one token: the record without its padding."""
        return self.down_offset + int(self.hidden * self.inner * self.format.bytes_per_weight)


def expert_layout(fmt: WeightFormat, hidden: int, inner: int) -> ExpertLayout:
    matrix = int(hidden * inner * fmt.bytes_per_weight)
    padded = -(-3 * matrix // RECORD_ALIGN_BYTES) * RECORD_ALIGN_BYTES
    return ExpertLayout(fmt, hidden, inner, 0, matrix, 2 * matrix, padded)
