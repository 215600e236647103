"""Slots of recurrent states, model-checked: who holds which after any steps and departures."""

from __future__ import annotations

from driving import request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftd.engine.api import Anchor
from ftd.engine.recurrence import Recurrence
from ftd.kv.states import LIVE_STATES
from ftd.schedule.sequence import Sequence

MAX_RUNNING = 3
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)


class RecurrenceMachine(RuleBasedStateMachine):
    """What the core does with it: start, step, commit or give up, preempt, end, forget."""

    @initialize(kept=st.integers(0, 5), apart=st.booleans())
    def begin(self, kept, apart):
        self.now = 0
        self.num_slots = LIVE_STATES * MAX_RUNNING + kept
        self.num_live = LIVE_STATES * MAX_RUNNING if apart else 0
        self.recurrence = Recurrence(
            self.num_slots, MAX_RUNNING, 2, lambda: self.now,
            num_live=self.num_live, copy=self.copy,
        )  # fmt: skip
        self.running = []
        self.moves = []  # of the step under way: (sequence, tokens, moves)
        self.states = {}  # slot -> the tokens that its state sums up, as written
        self.arrivals = 0

    def copy(self, source, target):
        assert source < self.num_live <= target
        self.states[target] = self.states[source]

    @precondition(lambda self: len(self.running) < MAX_RUNNING and not self.moves)
    @rule(prompt=PROMPTS, known=st.integers(0, 8), anchors=st.sets(st.integers(1, 8)))
    def start(self, prompt, known, anchors):
        self.arrivals += 1
        marks = tuple(Anchor(position, "role") for position in sorted(anchors))
        asked = request(str(self.arrivals), prompt, anchors=marks)
        sequence = Sequence(asked, self.arrivals)
        known = min(known, len(prompt) - 1)
        sequence.computed = self.recurrence.within(sequence.ids, known)
        assert sequence.computed <= known
        assert self.recurrence.start(sequence, known)
        self.running.append(sequence)

    @precondition(lambda self: self.running and not self.moves)
    @rule(data=st.data())
    def launch(self, data):
        for sequence in self.running:
            if sequence.pending == 0:
                sequence.ids.append(data.draw(st.integers(0, 1)))
            tokens = data.draw(st.integers(0, sequence.pending))
            if not tokens:
                continue
            moves = self.recurrence.step(sequence, tokens)
            self.moves.append((sequence, tokens, moves))
            before = tuple(sequence.ids[: sequence.computed])
            assert (moves.source is None) == (not before)
            assert moves.source is None or self.states[moves.source] == before
            ends = [end for end, _ in moves.targets]
            assert ends == sorted(ends) and ends[-1] == sequence.computed + tokens
            if self.num_live:
                *borders, last = (slot < self.num_live for _, slot in moves.targets)
                assert last and not any(borders)
        targets = [slot for _, _, m in self.moves for _, slot in m.targets]
        assert len(targets) == len(set(targets))
        assert not set(targets) & self.in_use()
        for sequence, _, moves in self.moves:
            for end, slot in moves.targets:
                self.states[slot] = tuple(sequence.ids[:end])

    @precondition(lambda self: self.moves)
    @rule()
    def commit(self):
        for sequence, tokens, moves in self.moves:
            sequence.computed += tokens
            self.recurrence.commit(sequence, moves)
        self.moves = []

    @precondition(lambda self: self.num_live and self.moves)
    @precondition(lambda self: all(s.pending == tokens for s, tokens, _ in self.moves))
    @rule(data=st.data())
    def commit_with_a_step_ahead(self, data):
        """Both are launched, then the first ends, perhaps some sequences, and then the second."""
        ahead = [self.recurrence.step_ahead(s, moves) for s, _, moves in self.moves]
        targets = [target for moves in ahead for _, target in moves.targets]
        assert len(targets) == len(set(targets)) == len(ahead)
        assert not set(targets) & {moves.source for moves in ahead}
        for (sequence, _, _), moves in zip(self.moves, ahead):
            token = data.draw(st.integers(0, 1))
            assert self.states[moves.source] == tuple(sequence.ids)
            sequence.ids.append(token)
            self.states[moves.targets[0][1]] = tuple(sequence.ids)
        first, self.moves = self.moves, []
        for sequence, tokens, moves in first:
            sequence.computed += tokens
            self.recurrence.commit(sequence, moves)
        for (sequence, _, _), moves in zip(first, ahead):
            if data.draw(st.booleans()):
                self.running.remove(sequence)
                self.recurrence.leave(sequence)
                self.recurrence.abandon(sequence, moves)
            else:
                sequence.computed += 1
                self.recurrence.commit(sequence, moves)

    @precondition(lambda self: self.moves)
    @rule()
    def give_up(self):
        for sequence, _, moves in self.moves:
            self.recurrence.abandon(sequence, moves)
        self.moves = []

    @precondition(lambda self: self.running and not self.moves)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data, keep):
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.recurrence.leave(sequence, keep=keep)

    @rule(seconds=st.sampled_from([1, 1000]))
    def wait(self, seconds):
        self.now += seconds

    @precondition(lambda self: not self.moves)
    @rule()
    def forget(self):
        self.recurrence.clear()

    def in_use(self):
        slots = self.recurrence._slots
        held = {slots[s.key] for s in self.running if s.key in slots}
        return held | {kept.slot for kept in self.recurrence.store}

    @invariant()
    def accounts_agree(self):
        if not hasattr(self, "running"):
            return
        pool, store = self.recurrence.pool, self.recurrence.store
        writing = {slot for _, _, moves in self.moves for _, slot in moves.targets}
        assert pool.free + pool.held == self.num_slots
        assert pool.held == len(self.in_use() | writing)
        assert len(store) <= self.recurrence.max_kept
        for kept in store:
            assert kept.slot >= self.num_live
            assert self.states[kept.slot] == tuple(kept.ids())
        for sequence in self.running:
            slot = self.recurrence._slots.get(sequence.key)
            tokens = tuple(sequence.ids[: sequence.computed])
            assert self.states.get(slot, ()) == tokens


TestRecurrence = RecurrenceMachine.TestCase
TestRecurrence.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
