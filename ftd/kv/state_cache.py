"""The memory behind the slots of ``ftd.kv.states``: the recurrent states of every delta layer.

A slot is one contiguous run of bytes, so that a state can be copied or stored as one piece. As with
pages, memory is taken when a slot is first written.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

from ftd.errors import BudgetExceeded
from ftd.model.spec import DeltaSpec, ModelSpec
from ftd.units import format_bytes

_ALIGN_BYTES = 64  # a cache line: what is computed from a state must not depend on its slot


class StateCache:
    """``recurrent[layer][slot]``: [NV, DK, DV] float32; ``tail[layer][slot]``: [W - 1, C] act.

    ``layer`` counts delta layers. The tail is the input of the convolution at the last W - 1
    tokens. A slot holds zeros until it is first written, and anything after that.
    """

    def __init__(self, spec: ModelSpec, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes(spec, dtype.itemsize)
        self._memory = _map(num_slots * self.slot_bytes)
        slots = torch.frombuffer(self._memory, dtype=torch.uint8).view(num_slots, self.slot_bytes)
        self.recurrent: list[torch.Tensor] = []
        self.tail: list[torch.Tensor] = []
        offset = 0
        for layer in spec.delta_layers:
            for tensors, shape, kind in (
                (self.recurrent, _recurrent_shape(layer), torch.float32),
                (self.tail, _tail_shape(layer), dtype),
            ):
                num_bytes = prod(shape) * kind.itemsize
                tensors.append(
                    slots[:, offset : offset + num_bytes].view(kind).view(num_slots, *shape)
                )
                offset += _aligned(num_bytes)
        self._slots = slots

    def slot(self, slot: int) -> torch.Tensor:
        """All of one state, [slot_bytes] uint8: a view."""
        return self._slots[slot]

    def close(self) -> None:
        """Give the memory back. Views that outlive this read zeros."""
        self.recurrent, self.tail = [], []
        self._slots = self._slots[:0]
        self._memory.madvise(mmap.MADV_DONTNEED)


def slot_bytes(spec: ModelSpec, act_bytes: int) -> int:
    """Bytes of one sequence's state over all layers; 0 for a model that only attends."""
    return sum(
        _aligned(prod(_recurrent_shape(layer)) * 4) + _aligned(prod(_tail_shape(layer)) * act_bytes)
        for layer in spec.delta_layers
    )


def _recurrent_shape(layer: DeltaSpec) -> tuple[int, int, int]:
    return layer.num_value_heads, layer.key_dim, layer.value_dim


def _tail_shape(layer: DeltaSpec) -> tuple[int, int]:
    return layer.conv_width - 1, layer.channels


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _map(num_bytes: int) -> mmap.mmap:
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
