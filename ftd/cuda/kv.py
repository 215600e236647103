"""Keys and values of every layer in device memory."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod

import torch

from ftd.errors import BudgetExceeded
from ftd.kv.cache import KvCache
from ftd.model.spec import ModelSpec

from .memory import DeviceMemory, DeviceRange


class CudaKvCache(KvCache):
    """``KvCache`` on the device, with one page more than is counted: page 0, the scratch page.

    Rows of a captured step that no sequence uses write there; nobody reads it. The keys and the
    values of each layer are a range of their own, so a pool of any size is contiguous.
    """

    first_page = 1
    scratch_page = 0

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        memory: DeviceMemory,
        max_pages: int | None = None,
    ) -> None:
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.max_pages = (max_pages or num_pages) if memory.elastic else num_pages
        self._device = memory.device
        self._ranges: list[tuple[DeviceRange, int]] = []  # and bytes of a page in it
        self.k, self.v = [], []
        with ExitStack() as undo:
            undo.callback(self.close)
            for layer in spec.attention_layers:
                shape = (page_tokens, layer.num_kv_heads, layer.head_dim)
                for tensors in (self.k, self.v):
                    page_bytes = prod(shape) * dtype.itemsize
                    most, now = ((n + 1) * page_bytes for n in (self.max_pages, num_pages))
                    room = memory.reserve(most, now)
                    self._ranges.append((room, page_bytes))
                    room.bytes().zero_()  # a masked value is multiplied by 0: it must be a number
                    tensors.append(room.span()[:most].view(dtype).view(self.max_pages + 1, *shape))
            undo.pop_all()
        self.page_bytes = sum(page_bytes for _, page_bytes in self._ranges)
        self.bytes = sum(room.mapped_bytes for room, _ in self._ranges)

    def resize(self, num_pages: int) -> None:
        """As ``KvCache.resize``, with no step in flight.

        Raises:
            BudgetExceeded: the GPU has no more memory; nothing has changed.
        """
        assert 0 < num_pages <= self.max_pages, (num_pages, self.max_pages)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps and moves have read what goes away
        mapped = [room.mapped_bytes for room, _ in self._ranges]
        try:
            for room, page_bytes in self._ranges:
                room.resize((num_pages + 1) * page_bytes)
        except BudgetExceeded:
            for room, page_bytes in self._ranges:
                room.resize((self.num_pages + 1) * page_bytes)
            raise
        for (room, _), were in zip(self._ranges, mapped, strict=True):
            room.bytes()[were:].zero_()  # as at the start
        self.num_pages = num_pages
        self.bytes = sum(room.mapped_bytes for room, _ in self._ranges)

    def close(self) -> None:
        self.k, self.v = [], []
        for room, _ in self._ranges:
            room.close()
