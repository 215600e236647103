"""Recurrent states on a GPU: those of running sequences in its memory, kept ones beside experts.

A kept state is read once, when somebody resumes from it, and that takes a millisecond over the
link; in GPU memory its place is better used by experts. So kept slots are registered host memory,
which kernels read and write by address as they do their own.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import structlog
import torch

from ftd.kv.state_cache import StateCache, layer_states, map_memory, slot_bytes
from ftd.model.spec import ModelSpec

from .driver import register_host
from .memory import DeviceMemory
from .pinned import Registration, cut, register_pieces

log = structlog.get_logger(__name__)


class CudaStates(StateCache):
    """``StateCache`` whose first ``num_live`` slots are on the device, and the others on the host.

    Where the system refuses to register host memory, there are no others: nothing is kept.

    Args:
        register: makes host memory readable by kernels; None: the driver does, on a GPU.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_live: int,
        num_kept: int,
        dtype: torch.dtype,
        memory: DeviceMemory,
        *,
        register: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self.slot_bytes = size = slot_bytes(spec, dtype.itemsize)
        self.num_live, self._device = num_live, memory.device
        self._room = memory.reserve(num_live * size, num_live * size)
        self._live = self._room.span()[: num_live * size].view(num_live, size)
        stride = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # registered pieces share no page
        self._memory = map_memory(num_kept * stride)
        with suppress(OSError):  # all of it is taken now, and there are fewer huge pages to pin
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        kept = torch.frombuffer(self._memory, dtype=torch.uint8)[: num_kept * stride]
        self._registration = Registration()
        if register is None and memory.device.type == "cuda":
            register = register_host
        if register is not None and num_kept:
            pieces = cut(kept.data_ptr(), len(kept), stride)
            self._registration = register_pieces(pieces, memory.device, register)
        if not self._registration.pinned:
            log.warning(
                "states.not_pinned",
                reason=self._registration.reason,
                cost="no recurrent state is kept: every prompt is computed from its beginning",
                hint="raise the limit on locked memory (ulimit -l, LimitMEMLOCK)",
            )
            num_kept, kept = 0, kept[:0]
        self.num_slots = num_live + num_kept
        self._slots = kept.view(num_kept, stride)[:, :size]
        address = torch.cat(
            [
                self._room.address + size * torch.arange(num_live),
                kept.data_ptr() + stride * torch.arange(num_kept),
            ]
        )
        self.layers = layer_states(spec, dtype.itemsize, address.to(memory.device))

    def slot(self, slot: int) -> torch.Tensor:
        live = slot < self.num_live
        return self._live[slot] if live else self._slots[slot - self.num_live]

    def copy(self, source: int, target: int) -> None:
        """In the order of the stream that steps run on, which alone read and write states."""
        self.slot(target).copy_(self.slot(source), non_blocking=True)

    def write(self, slot: int, state: torch.Tensor) -> None:
        """Waits for steps under way: they may still read what was in a kept slot, or write it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        super().write(slot, state)

    def close(self) -> None:
        """Nothing may run any more."""
        self._registration.close()
        self._live = self._live[:0]
        self._room.close()
        super().close()
