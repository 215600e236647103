"""Keys and values of every layer in device memory, one elastic range for each tensor."""

from __future__ import annotations

from math import prod

import torch

from ftd.kv.cache import KvCache
from ftd.model.spec import ModelSpec

from .memory import DeviceMemory, DeviceRange


class CudaKvCache(KvCache):
    """``KvCache`` on the device, with one page more than is counted: the scratch page.

    Rows of a captured step that no sequence uses write there; nobody reads it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        memory: DeviceMemory,
    ) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.k, self.v = [], []
        self._ranges: list[DeviceRange] = []
        for layer in spec.layers:
            heads, dim = layer.attention.num_kv_heads, layer.attention.head_dim
            shape = (num_pages + 1, page_tokens, heads, dim)
            num_bytes = prod(shape) * dtype.itemsize
            for tensors in (self.k, self.v):
                reserved = memory.reserve(num_bytes, num_bytes)
                self._ranges.append(reserved)
                tensors.append(reserved.bytes()[:num_bytes].view(dtype).view(shape))
                tensors[-1].zero_()  # a masked key is multiplied by 0: it must be a number
        self.bytes = sum(r.mapped_bytes for r in self._ranges)

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    def close(self) -> None:
        self.k, self.v = [], []
        while self._ranges:
            self._ranges.pop().close()
