"""The slot table against a small model of it, checked after every operation."""

from __future__ import annotations

import mmap

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.experts.slots import EMPTY, SlotMemory, SlotTable

L, E = 3, 5


class SlotMachine(RuleBasedStateMachine):
    """The model: resident keys, filling ones, what each slot holds, and which slots are lent."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(L, E, 4)
        self.resident: dict[int, int] = {}
        self.filling: dict[int, int] = {}
        self.lent: list[int] = []
        self.total = 4

    def free(self) -> int:
        return self.total - len(self.resident) - len(self.filling) - len(self.lent)

    @precondition(lambda self: self.free() > 0)
    @rule(data=st.data())
    def take(self, data):
        absent = sorted(set(range(L * E)) - set(self.resident) - set(self.filling))
        key = data.draw(st.sampled_from(absent))
        self.filling[key] = self.table.take(key)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def commit(self, data):
        key = data.draw(st.sampled_from(sorted(self.filling)))
        self.resident[key] = self.filling.pop(key)
        assert self.table.commit(key) == self.resident[key]

    @rule(most=st.integers(0, 3))
    def lend(self, most):
        slots = self.table.lend(most)
        assert len(slots) == min(most, self.free())
        self.lent.extend(slots)

    @precondition(lambda self: self.lent)
    @rule(key=st.integers(EMPTY, L * E - 1))
    def settle(self, key):
        slot = self.lent.pop(0)
        known = key == EMPTY or key in self.resident or key in self.filling
        assert self.table.settle(slot, key) is not known
        if not known:
            self.resident[key] = slot

    @rule()
    def abandon_fills(self):
        self.table.abandon_fills()
        self.filling.clear()

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def evict(self, data):
        key = data.draw(st.sampled_from(sorted(self.resident)))
        self.table.evict(key)
        del self.resident[key]

    @precondition(lambda self: not self.filling and not self.lent)
    @rule(total=st.integers(0, L * E), seed=st.integers(0, 1000))
    def resize(self, total, seed):
        value = np.random.default_rng(seed).random((L, E))
        resized = self.table.resize(total, value)
        best = sorted(self.resident, key=lambda key: value.ravel()[key])
        gone = best[: max(0, len(best) - total)]
        assert sorted(resized.evicted) == sorted(gone)
        for key in gone:
            del self.resident[key]
        for key, source, target in resized.moves:
            assert self.resident[key] == source >= total > target
            self.resident[key] = target
        self.total = total

    @invariant()
    def agrees(self):
        table = self.table
        assert table.num_free == self.free() and table.num_used == len(self.resident)
        taken = len(table.filling) + table.num_lent + table.num_used
        assert table.num_free + taken == table.num_slots == self.total
        assert sorted(table.filling) == sorted(self.filling)
        slots = [*self.resident.values(), *self.filling.values(), *self.lent]
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.total for slot in slots)
        for key in range(L * E):
            assert table.residency.ravel()[key] == self.resident.get(key, EMPTY)
        owners = {slot: key for key, slot in self.resident.items()}
        for slot in range(self.total):
            assert table.owner(slot) == owners.get(slot, EMPTY)


TestSlotTable = SlotMachine.TestCase
TestSlotTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_growing_moves_nothing():
    table = SlotTable(L, E, 2)
    for key in (3, 7):
        table.take(key)
        table.commit(key)
    before = table.residency.copy()
    resized = table.resize(L * E, np.zeros((L, E)))
    assert not resized.evicted and not resized.moves
    np.testing.assert_array_equal(table.residency, before)


def test_memory_keeps_addresses_and_gives_released_slots_back_as_zeros():
    memory = SlotMemory(8, mmap.PAGESIZE)
    for slot in range(8):
        memory.record(slot)[:] = slot + 1
    assert memory.address(3) - memory.address(0) == 3 * mmap.PAGESIZE
    assert memory.record(3).ctypes.data == memory.address(3)
    memory.release(4, 8)
    assert memory.record(3).min() == 4 and not memory.record(4).any()
    memory.close()
    memory.close()


def test_memory_that_is_not_touched_costs_no_memory():
    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * mmap.PAGESIZE

    before = resident_bytes()
    memory = SlotMemory(1 << 16, 1 << 20)  # 64 GiB
    memory.record(12_345)[:16] = 1
    assert resident_bytes() - before < 32 << 20
    memory.close()
