"""Slots of states and the store of kept ones, against a naive model: a dict of all prefixes."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.kv.states import StatePool, StateStore

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
SLOTS = 7


class StoreMachine(RuleBasedStateMachine):
    """Sequences that start from a kept state, step into new slots, keep some states, and leave."""

    def __init__(self):
        super().__init__()
        self.pool = StatePool(SLOTS)
        self.store = StateStore(self.pool)
        self.kept = {}  # tokens -> [slot, last use]
        self.running = []  # [ids, computed, slot or None]
        self.tick = 0

    def use(self, ids):
        self.tick += 1
        self.kept[ids][1] = self.tick

    @rule(ids=TOKENS, limit=st.integers(0, 9))
    def start(self, ids, limit):
        within = min(limit, len(ids) - 1)
        known = [n for n in range(1, within + 1) if ids[:n] in self.kept]
        deepest = max(known, default=0)
        assert self.store.find(array("i", ids), within) == deepest
        slot = self.store.take(array("i", ids), deepest)
        if deepest:
            assert slot == self.kept[ids[:deepest]][0]
            self.use(ids[:deepest])
        else:
            assert slot is None
        self.running.append([ids, deepest, slot])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), commit=st.booleans(), keep=st.booleans())
    def step(self, data, commit, keep):
        sequence = data.draw(st.sampled_from(self.running))
        ids, computed, slot = sequence
        if computed == len(ids):
            return
        target = self.pool.allocate()
        if target is None:
            assert self.pool.held == SLOTS
            return
        assert target not in {s for _, _, s in self.running}
        assert target not in {s for s, _ in self.kept.values()}
        if not commit:
            self.pool.release(target)
            return
        if slot is not None:
            self.pool.release(slot)
        sequence[1:] = data.draw(st.integers(computed + 1, len(ids))), target
        if keep:
            key = ids[: sequence[1]]
            self.store.keep(array("i", key), target)
            self.kept.setdefault(key, [target, 0])
            self.use(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        _, _, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if slot is not None:
            self.pool.release(slot)

    @rule(n=st.integers(1, 3))
    def evict(self, n):
        in_use = {slot for _, _, slot in self.running}
        idle = [ids for ids, (slot, _) in self.kept.items() if slot not in in_use]
        victims = sorted(idle, key=lambda ids: self.kept[ids][1])[:n]
        assert self.store.evict(n) == len(victims)
        for ids in victims:
            del self.kept[ids]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        ids = data.draw(st.sampled_from(sorted(self.kept)))
        self.store.drop(next(k for k in self.store if k.slot == self.kept[ids][0]))
        del self.kept[ids]

    @rule()
    def clear(self):
        self.store.clear()
        self.kept.clear()

    @invariant()
    def accounts_agree(self):
        used = {slot for _, _, slot in self.running if slot is not None}
        held = used | {slot for slot, _ in self.kept.values()}
        assert self.pool.held == len(held)
        assert self.pool.free + self.pool.held == self.pool.num_slots
        assert self.store.idle == len(held - used)
        assert len(self.store) == len(self.kept)

    @invariant()
    def every_state_is_found_with_its_tokens(self):
        for kept in self.store:
            ids = tuple(kept.ids())
            assert self.kept[ids][0] == kept.slot and kept.position == len(ids)
            before = max((n for n in range(1, len(ids)) if ids[:n] in self.kept), default=0)
            assert kept.saved_tokens == len(ids) - before


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_long_beginnings_are_told_apart_wherever_they_differ():
    pool = StatePool(2)
    store = StateStore(pool)
    ids = array("i", range(5000))
    store.keep(ids, pool.allocate())
    for place in (0, 2047, 2048, 4999):
        other = ids[:]
        other[place] = -1
        assert store.find(other, 5000) == 0
    assert store.find(ids + ids, 10_000) == 5000
    assert store.find(ids, 4999) == 0
