"""Keys and values of every layer in device memory."""

from __future__ import annotations

from math import prod

import torch

from ftd.kv.cache import KvCache
from ftd.model.spec import ModelSpec

from .memory import DeviceMemory, round_up

_ALIGN_BYTES = 4096


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
        self.num_pages = self.max_pages = num_pages
        self.page_tokens = page_tokens
        shapes = [
            (num_pages + 1, page_tokens, layer.num_kv_heads, layer.head_dim)
            for layer in spec.attention_layers
        ]
        self.page_bytes = 2 * sum(prod(shape[1:]) * dtype.itemsize for shape in shapes)
        self.bytes = 2 * sum(round_up(prod(s) * dtype.itemsize, _ALIGN_BYTES) for s in shapes)
        self._range = memory.reserve(self.bytes, self.bytes)
        whole = self._range.bytes()
        whole.zero_()  # a masked value is multiplied by 0: it must be a number
        self.k, self.v = [], []
        offset = 0
        for shape in shapes:
            num_bytes = prod(shape) * dtype.itemsize
            for tensors in (self.k, self.v):
                tensors.append(whole[offset : offset + num_bytes].view(dtype).view(shape))
                offset += round_up(num_bytes, _ALIGN_BYTES)

    @property
    def scratch_page(self) -> int:
        return self.num_pages

    def close(self) -> None:
        self.k, self.v = [], []
        self._range.close()
