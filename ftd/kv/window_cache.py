"""The memory of layers that see a window: pages of running sequences, and copies to resume from.

The pages are few and never change their number: a sequence gives them back as it goes on
(``ftd.engine.windows``). Page 0 is nobody's: it stands in page tables for what has been given back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ftd.kv.state_cache import StateCache, map_memory
from ftd.kv.windowing import Windowing


class WindowPages:
    """``k[layer]`` and ``v[layer]``: [P, page_tokens, NKV, D], zero until written.

    ``layer`` is one of ``windowing.layers``.
    """

    first_page = 1
    scratch_page = 0  # read where a mask hides it, and written by rows that nobody uses

    def __init__(
        self,
        windowing: Windowing,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.windowing = windowing
        self.num_pages, self.page_tokens = num_pages, page_tokens
        shape = (windowing.parts, num_pages * page_tokens, windowing.part_numbers)
        self._tokens = torch.zeros(shape, dtype=dtype, device=device)
        heads = (windowing.num_kv_heads, windowing.head_dim)
        pages = self._tokens.view(windowing.parts, num_pages, page_tokens, *heads)
        self.k = {layer: pages[2 * i] for i, layer in enumerate(windowing.layers)}
        self.v = {layer: pages[2 * i + 1] for i, layer in enumerate(windowing.layers)}

    def save(self, pages: Sequence[int], position: int, into: torch.Tensor) -> None:
        """Copy what a sequence needs to go on from ``position``, [slot_bytes] uint8.

        Args:
            pages: of the sequence, in order.
        """
        found = self._tokens[:, self._places(pages, position)]  # [parts, n, NKV * D]
        self._part(into, position).copy_(found, non_blocking=True)

    def load(self, pages: Sequence[int], position: int, source: torch.Tensor) -> None:
        """Put what ``save`` has copied into pages of a sequence that goes on from there."""
        found = self._part(source, position).to(self._tokens.device, non_blocking=True)
        self._tokens[:, self._places(pages, position)] = found

    def close(self) -> None:
        """Give the memory back; nothing may run any more."""
        self.k, self.v = {}, {}
        self._tokens = self._tokens.new_empty(0)

    def _begin(self, position: int) -> int:
        return max(0, position - self.windowing.tokens)

    def _places(self, pages: Sequence[int], position: int) -> torch.Tensor:
        at = np.arange(self._begin(position), position)
        of = np.asarray(pages, np.int64)[at // self.page_tokens]
        places = torch.from_numpy(of * self.page_tokens + at % self.page_tokens)
        if self._tokens.is_cuda:  # from pinned memory nothing waits for the steps under way
            places = places.pin_memory()
        return places.to(self._tokens.device, non_blocking=True)

    def _part(self, slot: torch.Tensor, position: int) -> torch.Tensor:
        """The beginning of a slot, as far as there are tokens: in one piece, to be one copy."""
        parts, numbers = self.windowing.parts, self.windowing.part_numbers
        tokens = position - self._begin(position)
        num_bytes = parts * tokens * numbers * self._tokens.dtype.itemsize
        return slot[:num_bytes].view(self._tokens.dtype).view(parts, tokens, numbers)


class WindowStates(StateCache):
    """``StateCache`` for what ``WindowPages`` copies: all slots are to resume from."""

    def __init__(self, windowing: Windowing, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.slot_bytes = size = windowing.slot_bytes(dtype.itemsize)
        self._memory = map_memory(num_slots * size)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._slots = slots[: num_slots * size].view(num_slots, size)
        self.layers = []
