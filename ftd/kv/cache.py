"""The memory behind the pages: keys and values of every layer.

One anonymous mapping that the system fills in as pages are first written: a large pool costs
nothing until it is used, and closing gives everything back at once, whatever views are still about.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Protocol

import torch

from ftd.errors import BudgetExceeded
from ftd.kv.state_cache import StateCache
from ftd.kv.window_cache import WindowPages
from ftd.model.spec import AttentionSpec, ModelSpec
from ftd.units import format_bytes

_ALIGN_BYTES = 4096  # a page of memory: no two tensors share one
_MOVED_AT_ONCE = 256  # pages: what is copied stands twice in memory for a moment
# Address space beyond what is in use must not count as memory that was promised.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # <linux/mman.h>; Python names it from 3.13 on


class Landing(Protocol):
    """Work on its way."""

    def passed(self) -> bool: ...
    def wait(self) -> None: ...


class KvCache:
    """``k[layer]`` and ``v[layer]``: [P, page_tokens, NKV, D], zero until written.

    ``layer`` counts those that attend; recurrent ones have their states beside it.

    Args:
        num_pages: in use at first.
        max_pages: address space for so many, P, if the system grants it: ``resize`` may go so far.
        windows: where some layers have pages of their own; nothing below moves or copies those.
    """

    first_page = 0  # those below are no sequence's
    page_stride = 1  # in k and v a sequence's page p is number p * page_stride
    states: StateCache | None = None  # of a model with recurrent layers, or with ``windows``

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        max_pages: int | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.windows = windows
        tokens = [
            (page_tokens, layer.num_kv_heads, layer.head_dim)
            for layer in paged_layers(spec, windows)
        ]
        page_bytes = [prod(shape) * dtype.itemsize for shape in tokens]  # of k, and again of v
        self.page_bytes = 2 * sum(page_bytes)
        self._memory, self.max_pages = _map(page_bytes, num_pages, max_pages or num_pages)
        self.bytes = len(self._memory)
        k: list[torch.Tensor] = []
        v: list[torch.Tensor] = []
        self._parts: list[tuple[int, int]] = []  # (offset, bytes of a page) of each tensor
        offset = 0
        for shape, num_bytes in zip(tokens, page_bytes, strict=True):
            for tensors in (k, v):
                count = self.max_pages * prod(shape)
                flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)
                tensors.append(flat.view(self.max_pages, *shape))
                self._parts.append((offset, num_bytes))
                offset += _aligned(self.max_pages * num_bytes)
        self._set(k, v)

    def _set(self, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        """Of layers whose pages are the cache's own."""
        self._paged = list(zip(k, v, strict=True))
        self.k, self.v = k, v
        if self.windows is not None:
            self.k = _between(k, self.windows.k)
            self.v = _between(v, self.windows.v)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to); no page is both."""
        for at in range(0, len(moves), _MOVED_AT_ONCE):
            sources, targets = torch.tensor(moves[at : at + _MOVED_AT_ONCE]).T
            for both in self._paged:
                for tensor in both:
                    tensor[targets] = tensor[sources]

    def resize(self, num_pages: int) -> None:
        """Use pages 0 .. ``num_pages`` - 1 from now on. Memory of the others goes back at once.

        Addresses stay; what a page held that went away and came again is not defined.
        """
        assert 0 < num_pages <= self.max_pages, (num_pages, self.max_pages)
        for offset, page_bytes in self._parts:
            first = _aligned(offset + num_pages * page_bytes)
            end = _aligned(offset + self.num_pages * page_bytes)
            if first < end:
                self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)
        self.num_pages = num_pages

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first ``tokens`` of a page, of every layer. Cost: some µs a layer."""
        for both in self._paged:
            for layer in both:
                layer[target, :tokens] = layer[source, :tokens]

    def gather(self, pages: Sequence[int]) -> torch.Tensor | None:
        """[n, page_bytes] uint8: keys and values of each layer in turn; from any thread.

        None: a page has gone.
        """
        parts = [
            layer[list(pages)].view(torch.uint8).reshape(len(pages), -1)
            for both in self._paged
            for layer in both
        ]
        return torch.cat(parts, dim=1)

    def scatter(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Put into pages what ``gather`` has found, once; between two steps."""
        at, index = 0, list(pages)
        for both in self._paged:
            for layer in both:
                size = layer[0].numel() * layer.dtype.itemsize
                part = data[:, at : at + size].contiguous().view(layer.dtype)
                layer[index] = part.view(len(index), *layer.shape[1:])
                at += size

    def staging(self, num_pages: int) -> torch.Tensor:
        """[n, page_bytes] uint8 for ``scatter`` to read from; from any thread."""
        return torch.empty(num_pages, self.page_bytes, dtype=torch.uint8)

    def mark(self) -> Landing:
        """A place behind all that steps launched so far write."""
        return _Done()

    def join(self) -> None:
        """Steps launched from here on come behind all copies of pages that run beside them."""

    def trim(self) -> None:
        """Give back what resizing has left over, if anything."""

    def close(self) -> None:
        """Give the memory back. Views that outlive this read zeros."""
        self.k, self.v, self._paged = [], [], []
        self._memory.madvise(mmap.MADV_DONTNEED)


def paged_layers(spec: ModelSpec, windows: WindowPages | None) -> list[AttentionSpec]:
    """Those whose keys and values are in the cache's own pages."""
    apart = windows.windowing.layers if windows else ()
    return [layer for i, layer in enumerate(spec.attention_layers) if i not in apart]


def _between(paged: list[torch.Tensor], apart: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """All layers in order: those of ``apart`` at their places, the others where there is room."""
    rest = iter(paged)
    total = len(paged) + len(apart)
    return [apart[i] if i in apart else next(rest) for i in range(total)]


class _Done:
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _map(page_bytes: Sequence[int], num_pages: int, max_pages: int) -> tuple[mmap.mmap, int]:
    """Address space for ``max_pages``, else for ``num_pages``; and for how many it is."""
    for pages in (max_pages, num_pages):
        size = 2 * sum(_aligned(pages * num_bytes) for num_bytes in page_bytes)
        try:  # private: only then can madvise take pages back
            memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            if pages > num_pages:
                continue
            raise BudgetExceeded(
                f"the KV cache needs {format_bytes(size)}, the system refuses to map as much",
                hint="use a smaller --kv-tokens",
            ) from error
        with suppress(OSError):  # a kernel built without huge pages knows no such advice
            # A huge page of 2 MiB would be filled in for the first token of every layer.
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        return memory, pages
    raise AssertionError((num_pages, max_pages))
