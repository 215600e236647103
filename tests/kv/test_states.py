"""Slots of states and the store of kept ones, against a naive model: a dict of all prefixes."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ftd.kv.states import StatePool, StateStore
from ftd.kv.value import Cost, after_branches, rank

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
SLOTS = 7


class StoreMachine(RuleBasedStateMachine):
    """Sequences that start from a kept state, step into new slots, keep some states, and leave."""

    def __init__(self):
        super().__init__()
        self.pool = StatePool(SLOTS)
        self.now = 0
        self.store = StateStore(self.pool, lambda: self.now)
        self.kept = {}  # tokens -> [slot, last use, chance, hits]
        self.running = []  # [ids, computed, slot or None]

    def before(self, ids):
        return max((n for n in range(1, len(ids)) if ids[:n] in self.kept), default=0)

    def rank(self, ids):
        _, used, chance, hits = self.kept[ids]
        chance = after_branches(chance, max(0, hits - 1))
        return rank(Cost(1.0).seconds(self.before(ids), len(ids)), chance, used)

    @rule(ids=TOKENS, limit=st.integers(0, 9))
    def start(self, ids, limit):
        within = min(limit, len(ids) - 1)
        known = [n for n in range(1, within + 1) if ids[:n] in self.kept]
        deepest = max(known, default=0)
        assert self.store.find(array("i", ids), within) == deepest
        slot = self.store.take(array("i", ids), deepest)
        if deepest:
            kept = self.kept[ids[:deepest]]
            assert slot == kept[0]
            kept[1:] = self.now, kept[2], kept[3] + 1
        else:
            assert slot is None
        self.running.append([ids, deepest, slot])

    @precondition(lambda self: self.running)
    @rule(seconds=st.sampled_from([0, 10, 500, 3000]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data(), commit=st.booleans(), chance=st.sampled_from([0, 0.1, 0.5]))
    def step(self, data, commit, chance):
        sequence = data.draw(st.sampled_from(self.running))
        ids, computed, slot = sequence
        if computed == len(ids):
            return
        target = self.pool.allocate()
        if target is None:
            assert self.pool.held == SLOTS
            return
        assert target not in {s for _, _, s in self.running}
        assert target not in {kept[0] for kept in self.kept.values()}
        if not commit:
            self.pool.release(target)
            return
        if slot is not None:
            self.pool.release(slot)
        sequence[1:] = data.draw(st.integers(computed + 1, len(ids))), target
        if chance:
            key = ids[: sequence[1]]
            self.store.keep(array("i", key), target, chance)
            kept = self.kept.setdefault(key, [target, 0, 0, 0])
            kept[1:3] = self.now, max(kept[2], chance)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        _, _, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if slot is not None:
            self.pool.release(slot)

    @rule()
    def evict(self):
        in_use = {slot for _, _, slot in self.running}
        idle = {ids: self.rank(ids) for ids, kept in self.kept.items() if kept[0] not in in_use}
        assert self.store.evict() == bool(idle)
        if idle:
            left = {kept.slot for kept in self.store}
            gone = [ids for ids, kept in self.kept.items() if kept[0] not in left]
            assert len(gone) == 1 and idle[gone[0]] == min(idle.values())
            del self.kept[gone[0]]

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
        held = used | {kept[0] for kept in self.kept.values()}
        assert self.pool.held == len(held)
        assert self.pool.free + self.pool.held == self.pool.num_slots
        assert self.store.idle == len(held - used)
        assert len(self.store) == len(self.kept)

    @invariant()
    def every_state_is_found_with_its_tokens(self):
        for kept in self.store:
            ids = tuple(kept.ids())
            assert self.kept[ids][0] == kept.slot and kept.position == len(ids)
            assert len(kept.tokens) == len(ids) - self.before(ids)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_long_beginnings_are_told_apart_wherever_they_differ():
    pool = StatePool(2)
    store = StateStore(pool)
    ids = array("i", range(5000))
    store.keep(ids, pool.allocate(), 0.1)
    for place in (0, 2047, 2048, 4999):
        other = ids[:]
        other[place] = -1
        assert store.find(other, 5000) == 0
    assert store.find(ids + ids, 10_000) == 5000
    assert store.find(ids, 4999) == 0
