"""Pages of layers with a window, model-checked: what a token sees is there, all else is given back.

A token's keys are stood for by a number for all tokens up to it.
"""

from __future__ import annotations

import torch
from driving import request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ftd.engine.api import Anchor
from ftd.engine.windows import Windows
from ftd.kv.window_cache import WindowPages, WindowStates
from ftd.kv.windowing import Windowing
from ftd.schedule.sequence import Sequence

MAX_RUNNING, CHUNK, PAGE = 3, 7, 2
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class WindowMachine(RuleBasedStateMachine):
    """What the core does: passes of chunks, decode steps beside them, steps ahead, ends."""

    @initialize(kept=st.integers(0, 5), tokens=st.integers(1, 6))
    def begin(self, kept, tokens):
        self.now, self.arrivals = 0, 0
        windowing = Windowing((0,), tokens, 1, 1)
        num_pages = windowing.num_pages(PAGE, MAX_RUNNING, CHUNK)
        self.tokens = tokens
        self.pages = WindowPages(windowing, num_pages, PAGE, torch.float32)
        self.states = WindowStates(windowing, kept, torch.float32)
        self.windows = Windows(self.pages, self.states, lambda: self.now)
        self.running = []
        self.moves = []  # of the step under way: (sequence, tokens, moves)
        self.numbers = {}  # of beginnings

    def number(self, ids):
        return self.numbers.setdefault(tuple(ids), float(len(self.numbers) + 1))

    def compute(self, sequence, begin, end, table):
        """A step's part: all its tokens write, then each looks back."""
        keys = self.pages.k[0]
        for p in range(begin, end):
            assert table[p // PAGE] != 0
            keys[table[p // PAGE], p % PAGE] = self.number(sequence.ids[: p + 1])
        for q in range(begin, end):
            for p in range(max(0, q - self.tokens), q + 1):
                seen = float(keys[table[p // PAGE], p % PAGE])
                assert seen == self.number(sequence.ids[: p + 1]), (q, p)

    @precondition(lambda self: len(self.running) < MAX_RUNNING and not self.moves)
    @rule(prompt=PROMPTS, known=st.integers(0, 20), anchors=st.sets(st.integers(1, 20)))
    def start(self, prompt, known, anchors):
        self.arrivals += 1
        marks = tuple(Anchor(position, "role") for position in sorted(anchors))
        sequence = Sequence(request(str(self.arrivals), prompt, anchors=marks), self.arrivals)
        known = min(known, len(prompt) - 1)
        sequence.computed = self.windows.within(sequence.ids, known)
        assert self.windows.start(sequence, known)
        self.running.append(sequence)

    def launch(self, sequence, tokens):
        moves = self.windows.step(sequence, tokens)
        self.compute(sequence, sequence.computed, sequence.computed + tokens, moves.window)
        return sequence, tokens, moves

    def end_step(self, sequence, tokens, moves):
        sequence.computed += tokens
        self.windows.commit(sequence, moves)

    @precondition(lambda self: self.running and not self.moves)
    @rule(data=st.data())
    def launch_pass(self, data):
        budget = CHUNK
        for sequence in self.running:
            if sequence.pending > 1 and budget:
                tokens = data.draw(st.integers(1, min(budget, sequence.pending)))
                budget -= tokens
                self.moves.append(self.launch(sequence, tokens))

    @rule(data=st.data())
    def decode_beside(self, data):
        passing = [sequence for sequence, _, _ in self.moves]
        for sequence in self.running:
            if sequence not in passing and sequence.pending <= 1:
                if sequence.pending == 0:
                    sequence.ids.append(data.draw(st.integers(0, 1)))
                self.end_step(*self.launch(sequence, 1))

    @precondition(lambda self: not self.moves)
    @rule(data=st.data())
    def decode_with_a_step_ahead(self, data):
        """Both are launched, then the first ends, perhaps some sequences, and then the second."""
        rows = [s for s in self.running if s.pending <= 1]
        for sequence in rows:
            if sequence.pending == 0:
                sequence.ids.append(data.draw(st.integers(0, 1)))
        first = [self.launch(sequence, 1) for sequence in rows]
        ahead = []
        for sequence, _, moves in first:
            sequence.ids.append(data.draw(st.integers(0, 1)))
            following = self.windows.step_ahead(sequence, moves)
            begin = sequence.computed + 1
            self.compute(sequence, begin, begin + 1, following.window)
            ahead.append((sequence, 1, following))
        for step in first:
            self.end_step(*step)
        for step in ahead:
            sequence, _, moves = step
            if data.draw(st.booleans()):
                self.running.remove(sequence)
                self.windows.leave(sequence)
                self.windows.abandon(sequence, moves)
            else:
                self.end_step(*step)

    @precondition(lambda self: self.moves)
    @rule()
    def commit(self):
        for step in self.moves:
            self.end_step(*step)
        self.moves = []

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def give_up(self, data):
        """At a layer border, perhaps since one of them has left."""
        for sequence, _, moves in self.moves:
            self.windows.abandon(sequence, moves)
        if data.draw(st.booleans()):
            self.running.remove(self.moves[0][0])
            self.windows.leave(self.moves[0][0])
        self.moves = []

    @precondition(lambda self: self.running and not self.moves)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data, keep):
        sequence = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.windows.leave(sequence, keep=keep)

    @precondition(lambda self: not self.moves)
    @rule()
    def forget(self):
        self.windows.clear()

    @invariant()
    def accounts_agree(self):
        pool, kept = self.windows.window_pages, self.windows.pool
        assert pool.free + pool.held == pool.num_pages
        assert kept.free + kept.held == kept.num_slots
        assert kept.held - sum(len(m.targets) for _, _, m in self.moves) == len(self.windows.store)
        if not self.moves:  # nobody has more than what its next token sees, to whole pages
            most = -(-self.tokens // PAGE) + 1
            assert pool.held <= most * len(self.running)
        self.now += 1


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
