"""The recurrent states of running sequences, and of positions that others may resume from.

Beside its pages, a sequence holds the slot of the state after its computed tokens. A step reads it
and writes later ones to other slots; the sequence changes over when the step commits, so a step
that is given up needs no undoing. On the way through a prompt the states at its borders are kept:
where messages begin, where it parts from an earlier prompt, at regular distances, and at its last
whole page, which others find while the sequence still writes the next. What a sequence leaves is
kept, too.

A model without recurrent layers has no slots, and nothing here does anything.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ftd.kv.anchors import AnchorKind
from ftd.kv.states import LIVE_STATES, StatePool, StateStore
from ftd.kv.value import chance
from ftd.schedule.sequence import Sequence

GRID_TOKENS = 256  # an edit at no known border costs at most so much beside what follows it


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Of one sequence in one step."""

    source: int | None  # slot of the state before its first token; None: the sequence begins
    targets: tuple[tuple[int, int], ...]  # (tokens before it, slot), ascending; the last: all
    kept: tuple[float, ...]  # chance of each to be resumed from; 0: it is not at a border


class Recurrence:
    """Args:
    max_running: sequences at the same time; slots beyond what they need hold kept states.
    """

    def __init__(
        self,
        num_slots: int,
        max_running: int,
        page_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.page_tokens = page_tokens
        self.pool = StatePool(num_slots)
        self.store = StateStore(self.pool, clock)
        self.max_kept = num_slots - LIVE_STATES * max_running if num_slots else 0
        assert self.max_kept >= 0, (num_slots, max_running)
        self._slots: dict[str, int] = {}  # of sequences that have computed something
        self._forks: dict[str, int] = {}  # where running sequences part from what is cached
        self._writing = 0  # slots of borders in the step under way

    @property
    def is_used(self) -> bool:
        return self.pool.num_slots > 0

    def within(self, ids: array[int], known_tokens: int) -> int:
        """Of so many tokens with known KV, how many a sequence can begin with."""
        return self.store.find(ids, known_tokens) if self.is_used else known_tokens

    def start(self, sequence: Sequence, known_tokens: int) -> bool:
        """Give a sequence the state after its computed tokens.

        Args:
            known_tokens: how far the prefix tree agreed: it parts from an earlier prompt there.
        Returns:
            False if there is none: the sequence cannot go on from where it is.
        """
        if not self.is_used:
            return True
        self._forks[sequence.key] = known_tokens
        if self.store.find(sequence.ids, sequence.computed) != sequence.computed:
            return False
        slot = self.store.take(sequence.ids, sequence.computed)
        if slot is not None:
            self._slots[sequence.key] = slot
        return True

    def step(self, sequence: Sequence, tokens: int) -> StateMoves | None:
        """Slots for the states that the next ``tokens`` lead to."""
        if not self.is_used:
            return None
        end = sequence.computed + tokens
        wanted = borders(sequence, end, self._forks[sequence.key], self.page_tokens)
        targets, kept = [], []
        for position, chance_of in wanted.items():
            if position < end and (slot := self._border_slot()) is not None:
                targets.append((position, slot))
                kept.append(chance_of)
        last = self.pool.allocate()
        assert last is not None, (self.pool.num_slots, len(self.store), self._writing)
        return StateMoves(
            self._slots.get(sequence.key), (*targets, (end, last)), (*kept, wanted.get(end, 0.0))
        )

    def commit(self, sequence: Sequence, moves: StateMoves | None) -> None:
        """The step has ended: the sequence goes on from its last state, borders are kept."""
        if moves is None:
            return
        *before, (end, last) = moves.targets
        for (position, slot), chance_of in zip(before, moves.kept):
            self.store.keep(sequence.ids[:position], slot, chance_of)
            self.pool.release(slot)
        self._writing -= len(before)
        if moves.source is not None:
            self.pool.release(moves.source)
        self._slots[sequence.key] = last
        if moves.kept[-1] and self._has_room():
            self.store.keep(sequence.ids[:end], last, moves.kept[-1])

    def abandon(self, moves: StateMoves | None) -> None:
        """The step came to nothing."""
        if moves is None:
            return
        for _, slot in moves.targets:
            self.pool.release(slot)
        self._writing -= len(moves.targets) - 1

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Before a sequence gives up its pages: take its state, and keep it as they are kept."""
        self._forks.pop(sequence.key, None)
        slot = self._slots.pop(sequence.key, None)
        if slot is None:
            return
        if keep and self._has_room():
            self.store.keep(sequence.ids[: sequence.computed], slot, chance(AnchorKind.TURN))
        self.pool.release(slot)

    def clear(self) -> None:
        """Forget what is kept."""
        self.store.clear()

    def _border_slot(self) -> int | None:
        if not self._has_room():
            return None
        self._writing += 1
        return self.pool.allocate()

    def _has_room(self) -> bool:
        """Whether one more state can be kept; makes room if need be."""
        return len(self.store) + self._writing < self.max_kept or self.store.evict()


def borders(sequence: Sequence, end: int, fork: int, page_tokens: int) -> dict[int, float]:
    """Positions to keep a state at, behind what is computed and up to ``end``, in order.

    Each with the chance that it is resumed from.

    Within the prompt only: what follows is kept when the sequence leaves.
    """
    begin, last = sequence.computed, sequence.prompt_tokens - 1
    grid = range(begin // GRID_TOKENS * GRID_TOKENS, end + 1, GRID_TOKENS)
    kinds = [(anchor.position, anchor.kind) for anchor in sequence.request.anchors]
    kinds += [(fork, AnchorKind.FORK), (last // page_tokens * page_tokens, AnchorKind.USER)]
    found = dict.fromkeys(grid, chance(None))
    for position, kind in kinds:
        found[position] = max(found.get(position, 0.0), chance(kind))
    return {p: found[p] for p in sorted(found) if begin < p <= min(end, last)}
