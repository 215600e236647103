"""Random matrices of a given spread, as checkpoints of each format store them.

Numbers are drawn once, a block for each kind; a tensor is made of windows of it at places of its
own. Writing a model then costs one copy of its bytes, and no two experts hold the same numbers in
the same places.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import log2, prod

import torch

# root mean squares of codes drawn evenly
FP4_RMS = (sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8) ** 0.5
INT4_RMS = (sum(v * v for v in range(-8, 8)) / 16) ** 0.5

BLOCK = 3 << 22  # numbers of a block: 24 MiB of bfloat16, which a processor's cache can hold
WINDOW = 1 << 22  # numbers of a window at most

DTYPES = {  # as safetensors calls them
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip

Pieces = Callable[[random.Random], Iterator[torch.Tensor]]


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: its shape, and its numbers piece by piece."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Pieces

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def given(tensor: torch.Tensor) -> Stored:
    return Stored(tuple(tensor.shape), tensor.dtype, lambda _: iter([tensor]))


@lru_cache
def filled(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Stored:
    return given(torch.full(shape, value, dtype=torch.float32).to(dtype))


class Source:
    """Where random numbers come from."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._blocks: dict[tuple[torch.dtype, float], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._normal, self._codes = _drawn(seed)

    def wide(self, *shape: int) -> torch.Tensor:
        """Numbers of their own, float32."""
        return torch.randn(*shape, generator=self._generator)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Stored:
        with self._lock:
            if (dtype, std) not in self._blocks:
                self._blocks[dtype, std] = (self._normal * std).to(dtype)
            block = self._blocks[dtype, std]
        return Stored(shape, dtype, _windows(block, prod(shape)))

    def codes(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Stored:
        count = prod(shape) * dtype.itemsize
        return Stored(shape, dtype, _windows(self._codes, count))


@lru_cache(maxsize=1)
def _drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal numbers, and bytes."""
    generator, size = torch.Generator().manual_seed(seed + 1), BLOCK + WINDOW
    normal = torch.randn(size, generator=generator)
    return normal, torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _windows(block: torch.Tensor, count: int) -> Pieces:
    def pieces(rng: random.Random) -> Iterator[torch.Tensor]:
        for begin in range(0, count, WINDOW):
            at = rng.randrange(BLOCK)
            yield block[at : at + min(WINDOW, count - begin)]

    return pieces


Matrix = Iterator[tuple[str, Stored]]  # what follows the module's name, and the tensor


def bf16(source: Source, rows: int, columns: int, std: float) -> Matrix:
    yield "weight", source.normal(rows, columns, std=std)


def fp8(source: Source, rows: int, columns: int, std: float) -> Matrix:
    yield "weight", source.normal(rows, columns, dtype=torch.float8_e4m3fn)
    yield "weight_scale_inv", filled((-(-rows // 128), -(-columns // 128)), std, torch.bfloat16)


def nvfp4(source: Source, rows: int, columns: int, std: float) -> Matrix:
    yield "weight", source.codes(rows, columns // 2)
    yield "weight_scale", filled((rows, columns // 16), 1.0, torch.float8_e4m3fn)
    yield "weight_scale_2", filled((), std / FP4_RMS, torch.float32)
    yield "input_scale", filled((), 1.0, torch.float32)


def mxfp4(source: Source, rows: int, columns: int, std: float) -> Matrix:
    yield "weight_packed", source.codes(rows, columns // 2)
    yield "weight_scale", filled((rows, columns // 32), power_of_two(std), torch.uint8)


def int4(source: Source, rows: int, columns: int, std: float) -> Matrix:
    yield "weight_packed", source.codes(rows, columns // 8, dtype=torch.int32)
    yield "weight_scale", filled((rows, columns // 32), std / INT4_RMS, torch.bfloat16)
    yield "weight_shape", given(torch.tensor([rows, columns]))


def power_of_two(std: float) -> int:
    """The e8m0 code of the scale under which even codes of four bits have about this spread."""
    return round(log2(std / FP4_RMS)) + 127


FORMATS: dict[str, Callable[[Source, int, int, float], Matrix]] = {
    row.__name__: row for row in (bf16, fp8, nvfp4, mxfp4, int4)
}
DENSE_TOO = ("fp8",)  # formats in which attention is published as well as experts
