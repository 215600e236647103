"""The memory behind the pages: keys and values of every layer.

One anonymous mapping that the system fills in as pages are first written: a large pool costs
nothing until it is used, and closing gives everything back at once, whatever views are still about.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

from ftd.errors import BudgetExceeded
from ftd.model.spec import ModelSpec
from ftd.units import format_bytes

_ALIGN_BYTES = 4096  # a page of memory: no two tensors share one


class KvCache:
    """``k[layer]`` and ``v[layer]``: [P, page_tokens, NKV, D], zero until written."""

    def __init__(
        self, spec: ModelSpec, num_pages: int, page_tokens: int, dtype: torch.dtype
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        shapes = [
            (num_pages, page_tokens, layer.attention.num_kv_heads, layer.attention.head_dim)
            for layer in spec.layers
        ]
        sizes = [_aligned(prod(shape) * dtype.itemsize) for shape in shapes]
        self.bytes = 2 * sum(sizes)
        self._memory = _map(self.bytes)
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        offset = 0
        for shape, size in zip(shapes, sizes, strict=True):
            for tensors in (self.k, self.v):
                flat = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=offset)
                tensors.append(flat.view(shape))
                offset += size

    def close(self) -> None:
        """Give the memory back. Views that outlive this read zeros."""
        self.k, self.v = [], []
        self._memory.madvise(mmap.MADV_DONTNEED)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _map(num_bytes: int) -> mmap.mmap:
    try:  # private: only then can madvise take pages back
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetExceeded(
            f"the KV cache needs {format_bytes(num_bytes)}, the system refuses to map as much",
            hint="use a smaller --kv-tokens",
        ) from error
    with suppress(OSError):  # a kernel built without huge pages knows no such advice
        # A huge page of 2 MiB would be filled in for the first token of every layer.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
