"""Keys and values of every layer in device memory, a page in one piece."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ftd.kv.cache import KvCache, paged_layers
from ftd.kv.window_cache import WindowPages
from ftd.model.spec import ModelSpec
from ftd.units import MiB

from .memory import DeviceMemory
from .tables import Marker, on_stream

_MOVED_AT_ONCE_BYTES = 32 * MiB  # what is copied stands twice in memory for a moment


class CudaKvCache(KvCache):
    """``KvCache`` on the device, with one page more than is counted: page 0, the scratch page.

    Rows of a captured step that no sequence uses write there; nobody reads it.

    A page is one run of bytes: keys and values of each layer in turn, [2 L, page_tokens, NKV, D].
    So a pool of any size is one range, and a page goes to the host and back by one copy.
    ``k[layer]`` and ``v[layer]`` begin at their part of page 0, and the same part of the next page
    is ``page_stride`` numbers on: to kernels that is an ordinary tensor of pages.
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
        windows: WindowPages | None = None,
    ) -> None:
        self.windows, paged = windows, paged_layers(spec, windows)
        layers = {(layer.num_kv_heads, layer.head_dim) for layer in paged}
        assert len(layers) == 1, f"layers differ in their keys: {layers}"
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.max_pages = (max_pages or num_pages) if memory.elastic else num_pages
        self.page_stride = parts = 2 * len(paged)
        shape = (page_tokens, *layers.pop())
        self._ranges = memory
        part = torch.Size(shape).numel()
        self.page_bytes = parts * part * dtype.itemsize
        most, now = ((n + 1) * self.page_bytes for n in (self.max_pages, num_pages))
        self._room = memory.reserve(most, now)
        self._room.bytes().zero_()  # a masked value is multiplied by 0: it must be a number
        flat = self._room.span()[:most].view(dtype)
        self.pages = flat.view(self.max_pages + 1, parts, page_tokens, -1)
        length = (self.max_pages * parts + 1) * part  # up to the last page's own
        views = [flat[i * part :][:length].view(-1, *shape) for i in range(parts)]
        self._set(views[0::2], views[1::2])
        self._raw = self._room.span()[:most].view(self.max_pages + 1, self.page_bytes)
        self.bytes = self._room.mapped_bytes
        device = memory.device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._gathers = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reading = threading.Lock()
        self._copied = Marker(device)  # all that has been queued there
        self._joined = True  # steps come behind it

    # ---- to host memory and back, beside the steps

    def save(self, pages: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Queue copies of pages to pinned memory, [page_bytes] uint8 each.

        Steps that write to these pages have to be launched behind ``join``.
        """
        with self._beside_steps():
            for page, row in zip(pages, rows, strict=True):
                row.copy_(self._raw[page], non_blocking=True)
            self._copied.mark()

    def load(self, pages: Sequence[int], rows: Sequence[torch.Tensor]) -> Marker:
        """Queue copies the other way; returns when they are done.

        Steps launched before that must not touch these pages, unless behind ``join``.
        """
        landed = Marker(self._ranges.device)
        with self._beside_steps():
            for page, row in zip(pages, rows, strict=True):
                self._raw[page].copy_(row, non_blocking=True)
            self._copied.mark()
            landed.mark()
        return landed

    # ---- to the disk and back

    def gather(self, pages: Sequence[int]) -> torch.Tensor | None:
        data = self.staging(len(pages))
        with self._reading:  # what is read is not unmapped meanwhile
            if not len(self._raw) or max(pages) > self.num_pages:
                return None
            with on_stream(self._gathers):
                for row, page in zip(data, pages):
                    row.copy_(self._raw[page], non_blocking=True)
            if self._gathers is not None:
                self._gathers.synchronize()
        return data

    def scatter(self, pages: Sequence[int], data: torch.Tensor) -> None:
        self.join()
        for row, page in zip(data, pages, strict=True):
            self._raw[page].copy_(row, non_blocking=True)

    def staging(self, num_pages: int) -> torch.Tensor:
        pin = self._gathers is not None
        return torch.empty(num_pages, self.page_bytes, dtype=torch.uint8, pin_memory=pin)

    def _beside_steps(self) -> AbstractContextManager[Any]:
        begun = Marker(self._ranges.device)
        begun.mark()  # steps launched so far write what is saved, and what stood where is loaded
        begun.hold(self._copies)
        self._joined = False
        return on_stream(self._copies)

    def mark(self) -> Marker:
        marker = Marker(self._ranges.device)
        marker.mark()
        return marker

    def join(self) -> None:
        if not self._joined and self._copies is not None:
            self._copied.hold(torch.cuda.current_stream(self._ranges.device))
        self._joined = True

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        self.join()
        at_once = max(1, _MOVED_AT_ONCE_BYTES // self.page_bytes)
        for at in range(0, len(moves), at_once):
            sources, targets = torch.tensor(moves[at : at + at_once]).T.to(self.pages.device)
            self.pages[targets] = self.pages[sources]

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.join()
        self.pages[target, :, :tokens] = self.pages[source, :, :tokens]

    def resize(self, num_pages: int) -> None:
        """As ``KvCache.resize``, with no step in flight.

        Raises:
            BudgetExceeded: the GPU has no more memory; nothing has changed.
        """
        assert 0 < num_pages <= self.max_pages, (num_pages, self.max_pages)
        if self._ranges.device.type == "cuda":
            torch.cuda.synchronize(self._ranges.device)  # steps and moves have read what goes away
        mapped = self._room.mapped_bytes
        with self._reading:
            self._room.resize((num_pages + 1) * self.page_bytes)
            self.num_pages = num_pages
        self._room.bytes()[mapped:].zero_()  # as at the start
        self.bytes = self._room.mapped_bytes

    def trim(self) -> None:
        self._ranges.trim()

    def close(self) -> None:
        if self._copies is not None:
            torch.cuda.synchronize(self._ranges.device)
        with self._reading:
            self.k, self.v, self._paged = [], [], []
            self.pages, self._raw = self.pages[:0], self._raw[:0]
            self._room.close()
