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
from ftd.kv.windowing import Windowing
from ftd.model.spec import ModelSpec

from .driver import register_host
from .memory import DeviceMemory
from .pinned import Registration, cut, register_pieces

log = structlog.get_logger(__name__)


class KeptSlots:
    """Slots of host memory, registered where the system does not refuse it (``pinned``).

    Args:
        cost: of a refusal, for people.
        register: makes host memory readable by kernels; None: the driver does, on a GPU.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        device: torch.device,
        cost: str,
        register: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self._device = device
        stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # registered pieces share no page
        self.memory = map_memory(num_slots * stride)
        with suppress(OSError):  # all of it is taken now, and there are fewer huge pages to pin
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        kept = torch.frombuffer(self.memory, dtype=torch.uint8)[: num_slots * stride]
        self._registration = Registration()
        if register is None and device.type == "cuda":
            register = register_host
        if register is not None and num_slots:
            pieces = cut(kept.data_ptr(), len(kept), stride)
            self._registration = register_pieces(pieces, device, register)
        self.pinned = self._registration.pinned
        if not self.pinned:
            log.warning(
                "states.not_pinned",
                reason=self._registration.reason,
                cost=cost,
                hint="raise the limit on locked memory (ulimit -l, LimitMEMLOCK)",
            )
        self.slots = kept.view(num_slots, stride)[:, :slot_bytes]
        self.address = kept.data_ptr() + stride * torch.arange(num_slots)

    def wait_for_steps(self) -> None:
        """They may still read what is in a slot, or write it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Nothing may run any more."""
        self._registration.close()


class CudaStates(StateCache):
    """``StateCache`` whose first ``num_live`` slots are on the device, and the others on the host.

    Where the system refuses to register host memory, there are no others: nothing is kept.
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
        self.num_live = num_live
        self._room = memory.reserve(num_live * size, num_live * size)
        self._live = self._room.span()[: num_live * size].view(num_live, size)
        cost = "no recurrent state is kept: every prompt is computed from its beginning"
        kept = self._kept = KeptSlots(num_kept, size, memory.device, cost, register)
        num_kept = num_kept if kept.pinned else 0
        self._memory, self._slots = kept.memory, kept.slots[:num_kept]
        self.num_slots = num_live + num_kept
        live = self._room.address + size * torch.arange(num_live)
        address = torch.cat([live, kept.address[:num_kept]])
        self.layers = layer_states(spec, dtype.itemsize, address.to(memory.device))

    def slot(self, slot: int) -> torch.Tensor:
        live = slot < self.num_live
        return self._live[slot] if live else self._slots[slot - self.num_live]

    def copy(self, source: int, target: int) -> None:
        """In the order of the stream that steps run on, which alone read and write states."""
        self.slot(target).copy_(self.slot(source), non_blocking=True)

    def write(self, slot: int, state: torch.Tensor) -> None:
        self._kept.wait_for_steps()
        super().write(slot, state)

    def close(self) -> None:
        """Nothing may run any more."""
        self._kept.close()
        self._live = self._live[:0]
        self._room.close()
        super().close()


class CudaWindowStates(StateCache):
    """Copies of windows to resume from, in host memory: each is one transfer.

    Where that memory is not registered, a copy waits for the steps before it.
    """

    def __init__(
        self,
        windowing: Windowing,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        register: Callable[[int, int], str | None] | None = None,
    ) -> None:
        self.slot_bytes = windowing.slot_bytes(dtype.itemsize)
        cost = "to keep a position to resume from waits for the step under way"
        self._kept = KeptSlots(num_slots, self.slot_bytes, device, cost, register)
        self._memory, self._slots = self._kept.memory, self._kept.slots
        self.num_slots = num_slots
        self.layers = []

    def write(self, slot: int, state: torch.Tensor) -> None:
        self._kept.wait_for_steps()
        super().write(slot, state)

    def close(self) -> None:
        """Nothing may run any more."""
        self._kept.close()
        super().close()
