"""The recurrent states of running sequences, and of positions that others may resume from.

Beside its pages, a sequence holds the slot of the state after its computed tokens. A step reads it
and writes later ones to other slots; the sequence changes over when the step commits, so a step
that is given up needs no undoing. On the way through a prompt the states at its borders are kept:
where messages begin, where it parts from an earlier prompt, at regular distances, and at its last
whole page, which others find while the sequence still writes the next. What a sequence leaves is
kept, too.

On a GPU running sequences have slots of their own, in its memory, and what is kept lies in host
memory: a sequence reads the state it resumes from over the link, borders are written there on the
way, and what it stands at is copied to be kept.

A model without recurrent layers has no slots, and nothing here does anything.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ftd.kv.anchors import AnchorKind
from ftd.kv.pages import PagePool
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
    window: Seq[int] = ()  # page table of layers with a window (``ftd.engine.windows``)


class Recurrence:
    """Args:
    max_running: sequences at the same time; slots beyond what they need hold kept states.
    num_live: slots, the first ones, that running sequences have for themselves; 0: all are alike.
    copy: a state from one of those to a slot where it is kept.
    """

    def __init__(
        self,
        num_slots: int,
        max_running: int,
        page_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        num_live: int = 0,
        copy: Callable[[int, int], None] = lambda source, target: None,
    ) -> None:
        self.page_tokens = page_tokens
        assert num_live in (0, LIVE_STATES * max_running), (num_live, max_running)
        self.pool = StatePool(num_slots, num_live)
        self.window_pages = PagePool(0, page_tokens)  # of layers with a window, where they are used
        self._copy = copy
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

    def step_ahead(self, sequence: Sequence, moves: StateMoves | None) -> StateMoves | None:
        """Slots of the token after ``moves``, launched before their step has been committed.

        In order of steps it writes when they have read: into their source, if nobody else has it.
        """
        if moves is None:
            return None
        (end, source), before = moves.targets[-1], moves.source
        target: int | None
        if before is not None and before < self.pool.num_live and self.pool.users(before) == 1:
            self.pool.retain(before)
            target = before
        else:
            target = self.pool.allocate()
        assert target is not None, (self.pool.num_slots, len(self.store), self._writing)
        return StateMoves(source, ((end + 1, target),), (0.0,))

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
        if moves.kept[-1]:
            self._keep(sequence.ids[:end], last, moves.kept[-1])

    def abandon(self, sequence: Sequence, moves: StateMoves | None) -> None:
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
        if keep:
            self._keep(sequence.ids[: sequence.computed], slot, chance(AnchorKind.TURN))
        self.pool.release(slot)

    def put_back(self, ids: array[int], chance_of: float) -> int | None:
        """Keep a state that comes from elsewhere; returns the slot to write it to, if any."""
        if self.store.find(ids, len(ids)) == len(ids) or not self._has_room():
            return None
        if (slot := self.pool.allocate_kept()) is not None:
            self.store.keep(ids, slot, chance_of)
            self.pool.release(slot)
        return slot

    def clear(self) -> None:
        """Forget what is kept."""
        self.store.clear()

    def _keep(self, ids: array[int], slot: int, chance_of: float) -> None:
        """Keep a sequence's own state while there is room."""
        if not self._has_room():
            return
        if slot >= self.pool.num_live or self.store.find(ids, len(ids)) == len(ids):
            self.store.keep(ids, slot, chance_of)
        elif (kept := self.pool.allocate_kept()) is not None:
            self._copy(slot, kept)
            self.store.keep(ids, kept, chance_of)
            self.pool.release(kept)

    def _border_slot(self) -> int | None:
        slot = self.pool.allocate_kept() if self._has_room() else None
        self._writing += slot is not None
        return slot

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
