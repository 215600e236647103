"""Slots: places that hold one expert each. Who is where, and on the CPU device the memory itself.

A slot is free, *filling* (taken for an expert whose record is being copied), *lent* (a step may
store in it whatever it reads) or *used* (its expert is resident). Free + filling + lent + used is
the number of slots after every operation.

Keys are flat, layer * E + expert, where layers count among those with experts.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np

from ftd.errors import BudgetExceeded
from ftd.units import format_bytes

EMPTY = -1


@dataclass(frozen=True, slots=True)
class Resized:
    evicted: tuple[int, ...]  # keys
    moves: tuple[tuple[int, int, int], ...]  # (key, from slot, to slot), to be copied in any order


class SlotTable:
    """Accounts for slots. ``residency`` is the authority on the host; nobody else writes it."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        assert 0 <= num_slots <= num_layers * num_experts, (num_slots, num_layers, num_experts)
        self.residency = np.full((num_layers, num_experts), EMPTY, np.int32)
        self._slot_of = self.residency.reshape(-1)  # the same memory, by key
        self._owner = [EMPTY] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: low slots first
        self._filling: dict[int, int] = {}  # key → slot
        self._lent: set[int] = set()

    @property
    def num_slots(self) -> int:
        return len(self._owner)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def filling(self) -> tuple[int, ...]:
        """Keys in the order in which they were taken."""
        return tuple(self._filling)

    @property
    def num_used(self) -> int:
        return len(self._owner) - len(self._free) - len(self._filling) - len(self._lent)

    def owner(self, slot: int) -> int:
        """Key of the resident expert, or EMPTY."""
        return self._owner[slot]

    def take(self, key: int) -> int:
        """Give a free slot to an expert that is neither resident nor filling."""
        assert self._slot_of[key] == EMPTY and key not in self._filling, key
        slot = self._free.pop()
        self._filling[key] = slot
        return slot

    def commit(self, key: int) -> int:
        """The record has landed: the expert is resident from now on. Returns its slot."""
        slot = self._filling.pop(key)
        self._owner[slot] = key
        self._slot_of[key] = slot
        return slot

    def lend(self, most: int) -> tuple[int, ...]:
        """Take up to ``most`` free slots for experts that are not known yet."""
        slots = tuple(self._free.pop() for _ in range(min(most, len(self._free))))
        self._lent.update(slots)
        return slots

    def settle(self, slot: int, key: int) -> bool:
        """A lent slot holds the record of ``key``, or EMPTY: nothing.

        False: it is free again, because it holds nothing or its expert is resident or on its way.
        """
        self._lent.remove(slot)
        if key == EMPTY or self._slot_of[key] != EMPTY or key in self._filling:
            self._free.append(slot)
            return False
        self._owner[slot] = key
        self._slot_of[key] = slot
        return True

    def abandon_fills(self) -> None:
        """What was being filled is worth nothing: those slots are free again."""
        self._free.extend(self._filling.values())
        self._filling.clear()

    def evict(self, key: int) -> None:
        slot = int(self._slot_of[key])
        assert slot != EMPTY, key
        self._slot_of[key] = EMPTY
        self._owner[slot] = EMPTY
        self._free.append(slot)

    def resize(self, num_slots: int, value: np.ndarray) -> Resized:
        """Change the number of slots; at a safe point, when nothing is filling.

        Growing keeps everything where it is. Shrinking evicts the least valuable that no longer fit
        and moves only survivors whose slot goes away.

        Args:
            value: [L, E], what each expert is worth.
        """
        assert not self._filling and not self._lent, (self._filling, self._lent)
        assert 0 <= num_slots <= self._slot_of.size, (num_slots, self._slot_of.size)
        residents = np.flatnonzero(self._slot_of != EMPTY)
        order = np.argsort(value.ravel()[residents], kind="stable")
        evicted = tuple(residents[order[: max(0, len(residents) - num_slots)]].tolist())
        for key in evicted:
            self.evict(key)
        owner = self._owner[:num_slots] + [EMPTY] * max(0, num_slots - len(self._owner))
        holes = [slot for slot in range(num_slots - 1, -1, -1) if owner[slot] == EMPTY]
        moves = []
        for slot, key in enumerate(self._owner[num_slots:], num_slots):
            if key != EMPTY:
                to = holes.pop()
                owner[to] = key
                self._slot_of[key] = to
                moves.append((key, slot, to))
        self._owner, self._free = owner, holes
        return Resized(evicted, tuple(moves))


# Address space is reserved for all slots that may ever be; touching a page takes memory for it.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # <linux/mman.h>; Python names it from 3.13 on


class SlotMemory:
    """Ordinary memory in place of VRAM. Addresses of slots never change while the object lives."""

    def __init__(self, max_slots: int, record_bytes: int) -> None:
        assert record_bytes % mmap.PAGESIZE == 0, record_bytes
        self._record_bytes = record_bytes
        size = max_slots * record_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        try:
            self._map = mmap.mmap(-1, size, flags)
        except OSError as e:
            raise BudgetExceeded(
                f"expert slots need {format_bytes(size)} of address space, "
                f"the system refused: {e.strerror}",
                hint="raise the address space limit (ulimit -v), or use 0 expert slots",
            ) from e
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._base = int(self._bytes.ctypes.data)

    def address(self, slot: int) -> int:
        return self._base + slot * self._record_bytes

    def record(self, slot: int) -> np.ndarray:
        """[record_bytes] uint8: a view, which may be written."""
        start = slot * self._record_bytes
        return self._bytes[start : start + self._record_bytes]

    def release(self, first: int, end: int) -> None:
        """Give the memory of slots ``first`` .. ``end`` - 1 back; their bytes are lost."""
        if first < end:
            start, length = first * self._record_bytes, (end - first) * self._record_bytes
            self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def close(self) -> None:
        """Give all memory back at once, even while views still exist. Idempotent."""
        if self._map.closed:
            return
        self._map.madvise(mmap.MADV_DONTNEED)
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is alive: the address space goes with it
            self._map.close()
