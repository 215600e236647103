"""Pinned host memory for KV pages, made ready a piece at a time, beside the engine.

Pinning takes a good part of a second for each GiB, and most of a large tier may never be needed: so
a thread pins the next pieces when the last ones fill up. It touches them first: while memory is
being pinned, other calls to the driver wait. Without the right to pin there is no tier.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_char

import structlog
import torch

from ftd.units import MiB

from .driver import register_host, unregister_host

log = structlog.get_logger(__name__)

PIECE_BYTES = 64 * MiB
AHEAD_PIECES = 4  # a chunk of a prompt may evict as much at once


class PinnedPages:
    """``ftd.kv.host.HostMemory``.

    Args:
        num_pages: that there may be in the end.
        register: pins memory; says why not.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        device: torch.device,
        *,
        register: Callable[[int, int], str | None] = register_host,
        unregister: Callable[[int], None] = unregister_host,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.num_pages = 0  # that are ready; the thread writes it last
        self._most_pages, self._page_bytes = num_pages, page_bytes
        self._piece_pages = max(1, min(piece_bytes // page_bytes, num_pages))
        self._device, self._register, self._unregister = device, register, unregister
        self._pieces: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._wanted, self._closed = threading.Event(), False
        self._target = 0  # pages
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            self._thread = threading.Thread(target=self._run, name="ftd-host-kv", daemon=True)
            self._thread.start()

    def row(self, page: int) -> torch.Tensor:
        piece, place = divmod(page, self._piece_pages)
        return self._pieces[piece][1][place]

    def want(self, num_pages: int) -> None:
        """So many, and some pieces ahead, for whoever comes next; at once on the CPU device."""
        ahead = AHEAD_PIECES * self._piece_pages
        self._target = min(num_pages + ahead, self._most_pages)
        if self.num_pages >= self._target:
            return
        if self._thread is not None:
            self._wanted.set()
        else:
            self._grow_to_target()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closed:
                return
            self._grow_to_target()

    def _grow_to_target(self) -> None:
        while not self._closed and self.num_pages < min(self._target, self._most_pages):
            self._grow()

    def _grow(self) -> None:
        pages = min(self._piece_pages, self._most_pages - self.num_pages)
        size = -(-pages * self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # fewer pages to pin, where there are huge ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        address = addressof(c_char.from_buffer(memory))
        rows = torch.frombuffer(memory, dtype=torch.uint8, count=pages * self._page_bytes)
        if self._thread is not None:
            rows.zero_()
        if self._device.type == "cuda" and (reason := self._register(address, size)):
            self._most_pages = self.num_pages
            log.warning(
                "host_kv.not_pinned",
                reason=reason,
                pages=self.num_pages,
                cost="KV that is evicted from the GPU beyond these is computed again",
                hint="raise the limit on locked memory (ulimit -l, LimitMEMLOCK)",
            )
            return
        self._pieces.append((memory, rows.view(pages, self._page_bytes)))
        self.num_pages += pages

    def close(self) -> None:
        """No copy may use it any more. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._wanted.set()
            self._thread.join()
        self.num_pages = 0
        while self._pieces:
            memory, rows = self._pieces.pop()
            if self._device.type == "cuda":
                self._unregister(rows.data_ptr())
            memory.madvise(mmap.MADV_DONTNEED)
