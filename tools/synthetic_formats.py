"""Random matrices of a given spread, as checkpoints of each format store them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

# root mean squares of codes drawn evenly
FP4_RMS = (sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8) ** 0.5
INT4_RMS = (sum(v * v for v in range(-8, 8)) / 16) ** 0.5

Stored = Iterator[tuple[str, torch.Tensor]]  # what follows the module's name, and the tensor


class Source:
    """Where random numbers come from: one generator on one device."""

    def __init__(self, seed: int, device: str) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        empty = torch.empty(*shape, device=self.device, dtype=torch.bfloat16)
        return empty.normal_(0, std, generator=self.generator)

    def wide(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator)

    def codes(self, *shape: int) -> torch.Tensor:
        empty = torch.empty(*shape, device=self.device, dtype=torch.uint8)
        return empty.random_(0, 256, generator=self.generator)


def bf16(source: Source, rows: int, columns: int, std: float) -> Stored:
    yield "weight", source.normal(rows, columns, std=std)


def fp8(source: Source, rows: int, columns: int, std: float) -> Stored:
    yield "weight", source.normal(rows, columns).to(torch.float8_e4m3fn)
    yield "weight_scale_inv", torch.full((-(-rows // 128), -(-columns // 128)), std).bfloat16()


def nvfp4(source: Source, rows: int, columns: int, std: float) -> Stored:
    yield "weight", source.codes(rows, columns // 2)
    yield "weight_scale", torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
    yield "weight_scale_2", torch.tensor(std / FP4_RMS)
    yield "input_scale", torch.tensor(1.0)


def mxfp4(source: Source, rows: int, columns: int, std: float) -> Stored:
    code = round(float(torch.tensor(std / FP4_RMS).log2())) + 127
    yield "weight_packed", source.codes(rows, columns // 2)
    yield "weight_scale", torch.full((rows, columns // 32), code, dtype=torch.uint8)


def int4(source: Source, rows: int, columns: int, std: float) -> Stored:
    yield "weight_packed", source.codes(rows, columns // 2).view(torch.int32)
    yield "weight_scale", torch.full((rows, columns // 32), std / INT4_RMS).bfloat16()
    yield "weight_shape", torch.tensor([rows, columns])


FORMATS: dict[str, Callable[[Source, int, int, float], Stored]] = {
    row.__name__: row for row in (bf16, fp8, nvfp4, mxfp4, int4)
}
DENSE_TOO = ("fp8",)  # formats in which attention is published as well as experts
