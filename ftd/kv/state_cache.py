"""The memory behind the slots of ``ftd.kv.states``: the recurrent states of every delta layer.

A slot is one contiguous run of bytes, so that a state can be copied or stored as one piece. As with
pages, memory is taken when a slot is first written.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from ftd.errors import BudgetExceeded
from ftd.kernels.delta import LayerStates
from ftd.model.spec import DeltaSpec, ModelSpec
from ftd.units import format_bytes

_ALIGN_BYTES = 64  # a cache line: what is computed from a state must not depend on its slot


class StateCache:
    """``layers[layer]`` says where a layer's part of each slot lies; it counts delta layers.

    A slot holds zeros until it is first written, and anything after that.
    """

    num_live = 0  # slots, the first ones, for running sequences alone; 0: all are alike

    def __init__(self, spec: ModelSpec, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes(spec, dtype.itemsize)
        self._memory = map_memory(num_slots * self.slot_bytes)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_slots, self.slot_bytes)
        address = slots.data_ptr() + self.slot_bytes * torch.arange(num_slots)
        self.layers = layer_states(spec, dtype.itemsize, address)
        self._slots = slots

    def slot(self, slot: int) -> torch.Tensor:
        """All of one state, [slot_bytes] uint8: a view."""
        return self._slots[slot]

    def copy(self, source: int, target: int) -> None:
        self.slot(target).copy_(self.slot(source))

    def write(self, slot: int, state: torch.Tensor) -> None:
        """Put a state there that comes from elsewhere, [slot_bytes] uint8."""
        self.slot(slot).copy_(state)

    def close(self) -> None:
        """Give the memory back. Views that outlive this read zeros."""
        self._slots = self._slots[:0]
        self._memory.madvise(mmap.MADV_DONTNEED)


def slot_bytes(spec: ModelSpec, act_bytes: int) -> int:
    """Bytes of one sequence's state over all layers; 0 for a model that only attends."""
    return sum(
        _recurrent_bytes(layer) + _tail_bytes(layer, act_bytes) for layer in spec.delta_layers
    )


def layer_states(spec: ModelSpec, act_bytes: int, address: torch.Tensor) -> list[LayerStates]:
    """How the layers divide a slot: each its recurrent part, then its tail."""
    found, offset = [], 0
    for layer in spec.delta_layers:
        tail = offset + _recurrent_bytes(layer)
        found.append(LayerStates(address, offset, tail))
        offset = tail + _tail_bytes(layer, act_bytes)
    return found


def _recurrent_bytes(layer: DeltaSpec) -> int:
    return _aligned(layer.num_value_heads * layer.key_dim * layer.value_dim * 4)


def _tail_bytes(layer: DeltaSpec, act_bytes: int) -> int:
    return _aligned((layer.conv_width - 1) * layer.channels * act_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def map_memory(num_bytes: int) -> mmap.mmap:
    """Host memory that is taken as it is touched. Raises BudgetExceeded."""
    num_bytes = max(num_bytes, mmap.PAGESIZE)  # none is no mapping
    try:  # private: only then can madvise take pages back
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise BudgetExceeded(
            f"recurrent states need {format_bytes(num_bytes)}, the system refuses to map as much",
            hint="use a smaller --max-running",
        ) from error
    with suppress(OSError):  # a kernel built without huge pages knows no such advice
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory
